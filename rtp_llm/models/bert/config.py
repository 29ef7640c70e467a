"""``config.json`` of BERT; defaults are those of transformers' ``BertConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rtp_llm.models.encoder import EncoderConfig, read_encoder
from rtp_llm.models.reader import config_reader


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> EncoderConfig:
    """Raises:
    ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    config = read_encoder(reader, names, vocab_size=30522, default_padding_id=None)
    reader.finish()
    return config
