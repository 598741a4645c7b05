"""A peer's text in a log stays in its line."""

from __future__ import annotations

from pathlib import Path

import grpc

from paceline.protocol.handshake import PROTOCOL_VERSION
from paceline.v1 import target_service_pb2 as pb
from paceline.v1 import target_service_pb2_grpc as pb_grpc
from paceline.v1 import types_pb2
from tests.e2e.cluster import Cluster, eventually

FORGED = "2026-01-01 00:00:00,000 ERROR paceline.runtime.process target service refused: everything"
INCARNATION = f"x\r\n{FORGED}\x1b[2J\u2028{FORGED}\x00" + "y" * 100_000


def test_an_incarnation_forges_no_line_and_fills_no_log(tmp_path: Path) -> None:
    with Cluster(tmp_path, drafters=()) as cluster:
        with grpc.insecure_channel(cluster.address_of("target")) as channel:
            hello = types_pb2.Hello(protocol_version=PROTOCOL_VERSION, incarnation=INCARNATION)
            stub = pb_grpc.TargetServiceStub(channel)
            call = stub.Verify(iter([pb.VerifyRequest(hello=hello)]))
            assert next(call).HasField("welcome")
            call.cancel()
        log = cluster.processes["target"].log_file
        eventually(lambda: "incarnation=x" in log.read_text(), "the link was logged")
        lines = log.read_bytes().decode().split("\n")
        (line,) = (line for line in lines if "incarnation=x" in line)
        assert r"incarnation=x\r\n2026-01-01" in line
        assert r"\x1b[2J\u20282026-01-01" in line
        assert "more characters)" in line
        assert len(line) < 5000
        assert not [line for line in lines if line.startswith(FORGED[:10])]
        assert all(line.isprintable() for line in lines)
        with cluster.client() as client:
            assert client.generate(token_ids=(1,), max_new_tokens=4).token_ids
