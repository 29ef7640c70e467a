"""Everything that can be wrong with what a checkpoint says about its own use."""

from __future__ import annotations

from enum import Enum


class RuntimeFault(Enum):
    """Faults of tokenizer, chat template, generation and pooling files, and of what is asked of a model."""

    BAD_TOKENIZER = "the tokenizer's files cannot be used"
    NO_CHAT_TEMPLATE = "the checkpoint has no chat template"
    BAD_CHAT_TEMPLATE = "the chat template cannot be applied"
    BAD_PROMPT = "a prompt that the model cannot take"
    WRONG_KIND = "the model is not made for what is asked"
    BAD_GENERATION_CONFIG = "the settings for generation make no sense"
    BAD_SAMPLING = "a way to choose tokens that makes no sense"
    BAD_POOLING = "the sentence-transformers files ask for something that is not there"
