"""`python healthy.py PORT SERVICE`: exit 0 if grpc.health.v1 on this machine's PORT says that SERVICE is SERVING."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

port, service = sys.argv[1:]
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2.0).status
    except grpc.RpcError as error:
        sys.exit(f"port {port}: {error.code().name}")
sys.exit(0 if status == health_pb2.HealthCheckResponse.SERVING else f"{service} is not SERVING")
