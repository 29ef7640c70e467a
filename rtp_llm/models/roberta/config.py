"""``config.json`` of RoBERTa and XLM-RoBERTa; defaults are those of transformers' ``RobertaConfig`` and ``XLMRobertaConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rtp_llm.models.encoder import EncoderConfig, read_encoder
from rtp_llm.models.reader import config_reader

#: The two configuration classes differ in this default alone, so ``model_type`` decides.
_VOCAB_SIZES = {"xlm-roberta": 30522}
_VOCAB_SIZE = 50265


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> EncoderConfig:
    """Raises:
    ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    vocab_size = _VOCAB_SIZES.get(str(raw.get("model_type")), _VOCAB_SIZE)
    config = read_encoder(reader, names, vocab_size=vocab_size, default_padding_id=1)
    reader.finish()
    return config
