"""`python healthy.py PORT SERVICE`: exit 0 if what listens on this machine's PORT is healthy.

A SERVICE is asked for by grpc.health.v1 and must be SERVING; a path such as /health must be answered 200 over HTTP.
"""

from __future__ import annotations

import http.client
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 2.0


def grpc_problem(port: str, service: str) -> str:
    """What is wrong with a service; empty: nothing."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
        except grpc.RpcError as error:
            return f"port {port}: {error.code().name}"
    return "" if status == health_pb2.HealthCheckResponse.SERVING else f"{service} is not SERVING"


def http_problem(port: str, path: str) -> str:
    """What is wrong with an HTTP server; empty: nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=TIMEOUT_S)
    try:
        connection.request("GET", path)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return f"port {port}: {error}"
    finally:
        connection.close()
    return "" if status == 200 else f"{path} answers {status}"


if __name__ == "__main__":
    asked_port, asked = sys.argv[1:]
    problem = http_problem(asked_port, asked) if asked.startswith("/") else grpc_problem(asked_port, asked)
    sys.exit(problem or 0)
