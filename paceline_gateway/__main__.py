"""`python -m paceline_gateway`: the HTTP gateway as a process."""

from __future__ import annotations

import asyncio
import inspect

from paceline.models.tokenizer import load_tokenizer
from paceline.runtime import logs, metrics, telemetry
from paceline.runtime.gateway_config import GatewayConfig
from paceline.runtime.options import parse_config
from paceline.runtime.process import keep_loaded, leave_torch_out, run_service
from paceline_gateway.app import create_app
from paceline_gateway.http.guard import RunningRequests
from paceline_gateway.http.server import open_socket, run_http
from paceline_gateway.upstream.services import Services


async def serve(config: GatewayConfig) -> None:
    """Load the tokenizer and serve until stopped.

    Raises:
        InvalidInput: the tokenizer can't be loaded, the port is taken, or a TLS file is not what it should be.
    """
    logs.use_format(config.server.log_format)
    telemetry.configure("paceline-gateway", config.traces)
    metrics.configure(
        "paceline-gateway", config.server, model=config.served_model_name or config.model, prometheus=True
    )
    try:
        listener = open_socket(config.server, config.reader_timeout_s)
        tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
        running_requests = RunningRequests()
        app = create_app(Services.of(config, tokenizer), running_requests)
        keep_loaded()
        await run_http(app, config, listener, running_requests)
    finally:
        telemetry.shutdown()
        metrics.shutdown()


def main() -> None:
    """Run the HTTP gateway.

    Example: paceline gateway --model smollm2-135m --coordinator 127.0.0.1:50051
    """
    leave_torch_out()
    run_service("gateway", lambda: serve(parse_config(GatewayConfig, inspect.getdoc(main) or "")))


if __name__ == "__main__":
    main()
