"""The encoder variants that are held against transformers."""

from __future__ import annotations

from typing import Any

from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaModel,
)

from tests.models.reference import SMALL_ENCODER

#: As RoBERTa: two positions are lost to counting from the padding token, whose id is 1.
ROBERTA = {"max_position_embeddings": 40, "type_vocab_size": 1}

VARIANTS: dict[str, tuple[Any, type[PreTrainedModel], dict[str, Any]]] = {
    "bert": (BertConfig, BertModel, {}),
    "bert-gelu-new": (BertConfig, BertModel, {"hidden_act": "gelu_new", "type_vocab_size": 4, "layer_norm_eps": 1e-3}),
    "bert-masked-lm": (BertConfig, BertForMaskedLM, {}),
    "bert-pretraining": (BertConfig, BertForPreTraining, {}),
    "roberta": (RobertaConfig, RobertaModel, ROBERTA),
    "roberta-masked-lm": (RobertaConfig, RobertaForMaskedLM, ROBERTA),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel, ROBERTA),
    "xlm-roberta-masked-lm": (XLMRobertaConfig, XLMRobertaForMaskedLM, ROBERTA),
}


def configured(variant: str) -> tuple[type[PreTrainedModel], Any]:
    """The model class and configuration of a variant, small."""
    config_class, model_class, options = VARIANTS[variant]
    return model_class, config_class(**{**SMALL_ENCODER, **options})
