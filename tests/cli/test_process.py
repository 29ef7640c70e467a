"""The command line as a process: streams, exit codes, start-up, signals, terminals."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import child_env
from tests.support.sparse import write_sparse_checkpoint
from tests.support.tiny import save_tiny_llama

COMMAND = [sys.executable, "-m", "rtp_llm.cli"]

#: Layers of the model that is large enough to be interrupted: 3.4 GB of zeros, which take no space on disk.
LAYERS = 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose load takes a second at least."""
    hidden, ffn, vocabulary = 2048, 5632, 4096
    matrices = {f"self_attn.{n}_proj": (hidden, hidden) for n in "qkvo"}
    matrices |= {"mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn)}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"model.layers.{i}.{name}.weight": ("BF16", shape) for i in range(LAYERS) for name, shape in matrices.items()
    }
    norms = [f"model.layers.{i}.{name}_layernorm.weight" for i in range(LAYERS) for name in ("input", "post_attention")]
    tensors |= dict.fromkeys((*norms, "model.norm.weight"), ("BF16", (hidden,)))
    tensors |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (vocabulary, hidden)))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    directory = tmp_path_factory.mktemp("large")
    write_sparse_checkpoint(directory, tensors, 4, config)
    return directory


def run(*arguments: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, env=child_env(), capture_output=True, text=True, timeout=60, check=False, **kwargs)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["load", "--help"], ["settings"], ["inspect", "CKPT"], ["load", "BROKEN"], ["plan", "BROKEN"]]
)
def test_quick_commands_import_neither_torch_nor_transformers(arguments: list[str], tiny: Path, tmp_path: Path) -> None:
    """Help, settings, ``inspect``, and every refusal of a broken checkpoint come without waiting for torch."""
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    given = [a.replace("CKPT", str(tiny)).replace("BROKEN", str(tmp_path)) for a in arguments]
    script = "import sys; from rtp_llm.cli import main; main(sys.argv[1:]); print(*sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script, *given], env=child_env(), capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy"} & set(done.stderr.splitlines()[-1].split())


def test_json_documents_stand_alone_on_stdout(tiny: Path) -> None:
    """One document, everything else on stderr, and nothing at all on stderr for a quick command."""
    done = run("load", tiny, "--device", "cpu", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["architecture"] == "LlamaForCausalLM" and "settings: " in done.stderr
    done = run("inspect", tiny, "--json")
    assert done.returncode == 0 and json.loads(done.stdout) and done.stderr == ""


def test_user_errors_exit_with_2_and_debug_shows_the_traceback(tiny: Path) -> None:
    """One message, no traceback, unless it is asked for."""
    done = run("load", tiny / "nothing")
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr and str(tiny / "nothing") in done.stderr
    done = run("load", tiny / "nothing", "--debug")
    assert done.returncode == 2 and "Traceback" in done.stderr and "CheckpointError" in done.stderr


def test_defects_exit_with_70_and_one_line(tiny: Path) -> None:
    """An error that nobody foresaw is told as a defect, not as a traceback."""
    script = (
        "import sys, rtp_llm.checkpoint as c; c.read_catalog = lambda d: 1 / 0; from rtp_llm.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "inspect", str(tiny)]
    done = subprocess.run(command, env=child_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 70 and "internal error: ZeroDivisionError" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["models", "--json"]])
def test_a_full_disk_is_a_user_error(tiny: Path, arguments: list[str]) -> None:
    """Output that cannot be written is said to be so."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments, *([str(tiny)] if "inspect" in arguments else [])],
            env=child_env(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2 and done.stderr == "No space left on device\n"


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_reader_that_goes_away_is_no_news(large: Path, form: list[str]) -> None:
    """``rtp-llm inspect ... | head -1`` ends quietly."""
    child = subprocess.Popen(
        [*COMMAND, "inspect", str(large), "--tensors", *form], env=child_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    # Closed before the first byte: what fits a pipe's buffer would never notice.
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait(timeout=60) == 1
    child.stderr.close()


def test_output_in_any_encoding(tiny: Path) -> None:
    """A terminal that cannot show a character gets its escape, not an error."""
    command = [*COMMAND, "inspect", str(tiny / "n→\x1bme")]
    done = subprocess.run(command, env=child_env({"PYTHONIOENCODING": "latin-1"}), capture_output=True, check=False)
    assert done.returncode == 1 and b"n\\u2192\\x1bme" in done.stdout and done.stderr == b""


def test_ctrl_c_ends_a_load_with_130_and_one_line(large: Path) -> None:
    """SIGINT in the middle of reading: reader threads stop, and one line tells it."""
    # Gives way to this process, which on a busy machine would be woken when the load has ended.
    command = ["nice", "-n", "19", *COMMAND, "load", str(large), "--device", "cpu"]
    for _ in range(10):
        child = subprocess.Popen(command, env=child_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        while "preflight" not in child.stderr.readline():
            assert child.poll() is None
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
        if child.returncode != 0:
            break
    lines = [line for line in err.splitlines() if not line.startswith("loading: ")]
    assert (child.returncode, out, lines) == (130, "", ["interrupted"])


def on_a_terminal(*arguments: object) -> tuple[int, str]:
    """Runs a command with a pseudo-terminal as its streams; returns its exit code and all that it wrote."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*COMMAND, *map(str, arguments)], child_env({"TERM": "xterm", "COLUMNS": "120"}))
    written = b""
    try:
        while piece := os.read(terminal, 65536):
            written += piece
    except OSError:  # Linux says EIO when the other side is closed
        pass
    finally:
        os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()


def test_a_terminal_gets_a_bar_unless_it_is_turned_off(tiny: Path) -> None:
    """The bar shows bytes, and is gone when the report comes; ``--no_progress`` has none."""
    code, written = on_a_terminal("load", tiny, "--device", "cpu")
    assert code == 0 and "loading" in written and "━" in written and "plan digest" in written
    code, written = on_a_terminal("load", tiny, "--device", "cpu", "--no_progress")
    assert code == 0 and "loading" not in written and "plan digest" in written


def test_hostile_names_do_not_reach_a_terminal(tiny: Path, tmp_path: Path) -> None:
    """A tensor's name is shown escaped by every command, as text and in errors."""
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    write_sparse_checkpoint(tmp_path, {"a\x1b]0;owned\x07[bold]": ("F32", (1,))}, 1, json.loads((tiny / "config.json").read_text()))
    for command in ("inspect --tensors", "plan", "load"):
        name, *options = command.split()
        _, written = on_a_terminal(name, tmp_path, *options)
        assert "\x1b]0;" not in written and r"a\x1b]0;owned\x07[bold]" in written, command


def test_inspect_stays_small(tiny: Path) -> None:
    """Looking at headers takes the memory of headers: a tenth of what torch would take."""
    status = "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)"
    script = f"import sys; from rtp_llm.cli import main; main(sys.argv[1:]); {status}"
    done = subprocess.run([sys.executable, "-c", script, "inspect", str(tiny)], env=child_env(), capture_output=True, text=True, check=True)
    assert int(done.stderr.split()[1]) < 60_000
