#!/usr/bin/env bash
# The whole road on two small real models; make demo prepares what it needs.
set -euo pipefail
cd "$(dirname "$0")/.."

models=.cache/models
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

show() {
    printf '\n$ rtp-llm'
    printf ' %q' "$@"
    printf '\n'
    .venv/bin/rtp-llm "$@"
}

show inspect "$models/smollm2"
show plan "$models/smollm2" --tp_size 3 --rank 0
show load "$models/smollm2" --verify
show generate "$models/smollm2" --prompt "What is the capital of France?" --max_new_tokens 32

# A sentence, the same thing in other words, and something else.
show embed "$models/minilm" \
    --text "A man is playing the guitar on the street." \
    --text "Someone performs music outdoors with a guitar." \
    --text "The central bank raised interest rates again."
