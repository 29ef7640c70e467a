#!/usr/bin/env bash
# The whole road on two small real models; make demo prepares what it needs.  Fails where the answer is not right.
set -euo pipefail
cd "$(dirname "$0")/.."

models=.cache/models
answer="The capital of France is Paris."
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

show() {
    local word
    printf '\n$ rtp-llm'
    for word in "$@"; do
        case $word in *\ *) printf ' "%s"' "$word" ;; *) printf ' %s' "$word" ;; esac
    done
    printf '\n'
    .venv/bin/rtp-llm "$@"
}

show inspect "$models/smollm2"
show plan "$models/smollm2" --tp_size 3 --rank 0
show load "$models/smollm2" --verify
said=$(show generate "$models/smollm2" --prompt "What is the capital of France?" --max_new_tokens 32)
printf '\n%s\n' "$said"
if [[ $said != *"$answer"* ]]; then
    echo "demo: expected: $answer" >&2
    exit 1
fi

# A sentence, the same thing in other words, and something else.
show embed "$models/minilm" \
    --text "A man is playing the guitar on the street." \
    --text "Someone performs music outdoors with a guitar." \
    --text "The central bank raised interest rates again."
