"""``rtp-llm embed``: load an encoder and embed sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rtp_llm.cli.options import LOADING, checkpoint_argument, common, output_of, setting_options
from rtp_llm.cli.output import print_table
from rtp_llm.cli.session import load_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rtp_llm.runtime.pooling import Recipe

_EXAMPLES = """\b
Examples:
  rtp-llm embed ./all-MiniLM-L6-v2 --text "A man is eating." --text "Someone has a meal." --text "The sky is blue."
  rtp-llm embed ./all-MiniLM-L6-v2 --text "one vector" --json
"""


@click.command(short_help="Embed sentences with an encoder.", epilog=_EXAMPLES)
@checkpoint_argument
@click.option("--text", "texts", required=True, multiple=True, help="A sentence; give the option once for each.")
@setting_options(*LOADING)
@common
@click.pass_context
def embed(context: click.Context, /, checkpoint: str, texts: tuple[str, ...], **flags: Any) -> int:
    """Embed sentences with the encoder in CKPT, pooled as its sentence-transformers files say.

    Prints the cosine of each pair; with --json also the vectors.
    """
    loaded, (recipe, tokenizer) = load_for(context, checkpoint, flags, lambda: _prepare(checkpoint))

    from rtp_llm.runtime.embedding import cosines, embed_texts, max_tokens

    vectors = embed_texts(loaded.model, tokenizer, recipe, texts)
    similar = cosines(vectors).tolist()
    document = {
        "texts": list(texts),
        "dimension": vectors.shape[1],
        "pooling": recipe.mode,
        "normalized": recipe.normalize,
        "max_seq_length": max_tokens(loaded.model, tokenizer, recipe),
        "embeddings": vectors.tolist(),
        "cosines": similar,
        "load": loaded.report.to_json(),
    }

    def text() -> None:
        rows = [(i + 1, *(f"{value:.4f}" for value in row), _short(texts[i])) for i, row in enumerate(similar)]
        print_table(("cosine", *map(str, range(1, len(texts) + 1)), "text"), rows, frozenset(range(len(texts) + 1)))

    output_of(context).emit(document, text)
    return 0


def _prepare(checkpoint: str) -> tuple[Recipe, PreTrainedTokenizerBase]:
    from rtp_llm.runtime.limits import require_kind
    from rtp_llm.runtime.pooling import read_recipe
    from rtp_llm.runtime.tokenizer import load_tokenizer

    require_kind(checkpoint, "encoder")
    return read_recipe(checkpoint), load_tokenizer(checkpoint)


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
