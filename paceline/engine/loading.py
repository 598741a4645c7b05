"""From a model's name to an engine."""

from __future__ import annotations

from paceline.engine.interface import Engine
from paceline.engine.table.engine import load_table
from paceline.models.resolve import resolve
from paceline.protocol.errors import require
from paceline.runtime.config import NOT_QUANTIZED, EngineSettings


def load_engine(model: str, settings: EngineSettings) -> Engine:
    """Load a model on the calling thread, which should be the executor's.

    Args:
        model: anything that `paceline.models.resolve.resolve` knows.
        settings: engine, dtype, device, threads, lengths and KV budget.

    Raises:
        InvalidInput: the name or a setting is out of its limits.
        Unsupported: the model can't be served exactly; says why.
    """
    source = resolve(model)
    if source.kind == "table":
        is_plain = settings.quantization == NOT_QUANTIZED
        require(is_plain, "quantization", settings.quantization, f"{NOT_QUANTIZED}: a table has no weights")
        return load_table(source.location, settings)
    from paceline.engine.llama.loading import load_llama_engine, picks_llama

    if picks_llama(source, settings):
        return load_llama_engine(source, settings)
    # Table models start in a fraction of the time that torch takes to be imported.
    from paceline.engine.decoder import load_decoder_engine
    from paceline.models.whole import refusing_network

    with refusing_network(source.name):
        return load_decoder_engine(source, model, settings)
