"""vLLM servers that follow the policy's weights."""

import logging
import shutil
import time
import weakref
from collections.abc import Sequence
from typing import Any

import httpx2
import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file

from mcp_grpo.errors import SamplerError, SettingsError
from mcp_grpo.sampling.vllm_backend import VLLMBackend
from mcp_grpo.sampling.vllm_server_generator import VLLMServerGenerator
from mcp_grpo.trl_compat import VLLMGeneration


logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT = 600.0  # seconds for a server to take weights
_RESET_TIME = 30.0  # seconds for it to drop requests that were aborted
_SAME_LOGPROB = 0.05  # nats that rounding may make


class VLLMServerBackend(VLLMBackend):
    """
    TRL's vLLM backend on servers (`vllm_mode="server"`).

    Every process talks to the servers itself. Merged weights go to a single server on another GPU by TRL's own NCCL
    transfer, and by files otherwise; adapters always go by files.
    """

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a prompt and its completion."""
        return self._max_context

    def make_generator(self, end_of_turn_ids: Sequence[int]) -> VLLMServerGenerator:
        """Make a generator that samples from the weights that were sent last."""
        self._generator = VLLMServerGenerator(
            self._urls, model=lambda: self._adapter or self._model_name, end_of_turn_ids=end_of_turn_ids
        )
        return self._generator

    def sync_weights(self) -> None:
        """See [`VLLMBackend.sync_weights`]. Of several servers, drop those that any process has lost."""
        self.accelerator.wait_for_everyone()  # until no process samples from the old weights
        if self._generator is not None and len(self._urls) > 1:
            up = gather_object([[url for url in self._generator.urls if _is_up(url)]])
            lost = [url for url in self._urls if not all(url in urls for urls in up)]
            if lost:
                logger.warning("Continuing without the vLLM servers at %s, which are lost.", ", ".join(lost))
            self._urls = [url for url in self._urls if url not in lost]
            self._generator.keep_only(self._urls)
        super().sync_weights()

    def wake_up(self) -> None:
        """Do nothing: servers do not sleep."""

    def sleep(self) -> None:
        """Do nothing: servers do not sleep."""

    @property
    def is_asleep(self) -> bool:
        """Always false: servers do not sleep."""
        return False

    def close(self) -> None:
        """Remove what was written for the servers, and from them. Safe to call more than once."""
        if self.accelerator.is_main_process and self._adapter is not None:
            for url in self._urls:
                try:
                    httpx2.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": self._adapter}, timeout=5.0)
                except httpx2.HTTPError:
                    continue
        self._adapter = None
        if self._generator is not None:
            self._generator.close()
        super().close()

    def _init_vllm(self) -> None:
        base = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
        self._urls = [url.rstrip("/") for url in self._settings.urls or [base]]
        self._model_name, self._max_context = "", 0
        self._generator: VLLMServerGenerator | None = None
        is_cuda = self.accelerator.device.type == "cuda"
        self._uses_nccl = not self.sends_adapters and len(self._urls) == 1 and is_cuda
        self._name = f"mcp-grpo-{gather_object([f'{time.time_ns():x}'])[0]}"
        self._folder = self._settings.folder.absolute() / self._name
        deadline = time.monotonic() + self.server_timeout
        for url in self._urls:
            _wait_for(url, deadline)
            model = self._get(url, "/v1/models")["data"][0]
            if self._model_name not in ("", model["id"]):
                raise SettingsError(f"The vLLM servers serve different models: {self._model_name!r}, {model['id']!r}.")
            self._model_name = model["id"]
            self._max_context = min(self._max_context or model["max_model_len"], model["max_model_len"])
            self._check_logprobs(url)
        weakref.finalize(self, shutil.rmtree, self._folder, True)
        if self._uses_nccl:
            self.server_base_url = self._urls[0]
            super(VLLMBackend, self)._init_vllm()

    def _check_logprobs(self, url: str) -> None:
        """Refuse a server whose log-probabilities are not those of the distribution that it samples from."""

        def best(temperature: float) -> float:
            body = {
                "model": self._model_name,
                "prompt": [0],
                "max_tokens": 1,
                "temperature": temperature,
                "logprobs": 1,
                "seed": 0,
                "top_p": 1.0,
                "top_k": 0,
            }
            choice = self._post(url, "/v1/completions", body)["choices"][0]
            return max(choice["logprobs"]["top_logprobs"][0].values())

        # At a low temperature the best token has nearly all of the probability, if the temperature is applied.
        if abs(best(2.0) - best(0.1)) < _SAME_LOGPROB:
            raise SettingsError(
                f"The vLLM server at {url} reports log-probabilities without the temperature, so that ratios would be "
                "wrong. Start it with `--logprobs-mode processed_logprobs`."
            )

    def _send_weights(self) -> None:
        self.bytes_sent = 0
        if self._uses_nccl:
            VLLMGeneration.sync_weights(self)
            self.accelerator.wait_for_everyone()  # only one of them has sent anything
            return
        assert self._folder
        folder = self._folder / f"version-{self._version}"
        is_main = self.accelerator.is_main_process
        state: dict[str, torch.Tensor] = {}
        for name, value in self._iter_named_params():
            if is_main:
                state[name] = value.detach().to("cpu", copy=True).contiguous()

        def send() -> None:
            folder.mkdir(parents=True)
            self._policy.config.save_pretrained(folder)
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
            for url in self._urls:
                body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                self._post(url, "/collective_rpc", body)
                self._forget(url)
            shutil.rmtree(folder, ignore_errors=True)

        self._together(send)

    def _forget(self, url: str) -> None:
        """Reset the cache of a server, once it has dropped aborted requests."""
        deadline = time.monotonic() + _RESET_TIME
        while (self._post(url, "/reset_prefix_cache") or {}).get("success") is False:
            if time.monotonic() > deadline:
                raise SamplerError(
                    f"The vLLM server at {url} has requests under way, and keeps its cache of old weights. Let no one else "
                    "use it while a policy trains."
                )
            time.sleep(0.2)

    def _send_adapter(self) -> None:
        folder = self._written_adapter(is_writer=self.accelerator.is_main_process)
        old, new = self._adapter, f"{self._name}-{self._version}"

        def send() -> None:
            for url in self._urls:
                self._post(url, "/v1/load_lora_adapter", {"lora_name": new, "lora_path": str(folder)})
                if old is not None:
                    self._post(url, "/v1/unload_lora_adapter", {"lora_name": old})
            shutil.rmtree(folder.with_name(f"version-{self._version - 1}"), ignore_errors=True)

        self._together(send)
        self._adapter = new

    def _together(self, send: Any) -> None:
        """Run this in the main process, and raise in all processes if it fails."""
        problem = None
        if self.accelerator.is_main_process:
            try:
                send()
            except Exception as error:
                problem = f"The weights could not be sent: {error}"
        problem = next((each for each in gather_object([problem]) if each), None)
        if problem is not None:
            raise SamplerError(problem)

    def _get(self, url: str, path: str) -> Any:
        return _answer(url, path, httpx2.get(f"{url}{path}", timeout=60.0))

    def _post(self, url: str, path: str, body: Any = None) -> Any:
        try:
            return _answer(url, path, httpx2.post(f"{url}{path}", json=body, timeout=_CONTROL_TIMEOUT))
        except httpx2.HTTPError as error:
            raise SamplerError(f"The vLLM server at {url} cannot be reached: {error!r}.") from error


def _answer(url: str, path: str, response: httpx2.Response) -> Any:
    if response.status_code == 200:
        return response.json() if response.headers.get("content-type", "").startswith("application/json") else None
    advice = {
        "/v1/load_lora_adapter": "Start it with `--enable-lora --max-lora-rank <the adapter's rank>` and "
        "`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, on a machine that reads the same folders as this one",
        "/collective_rpc": "Start it with `VLLM_SERVER_DEV_MODE=1`, on a machine that reads the same folders as this one",
        "/reset_prefix_cache": "Start it with `VLLM_SERVER_DEV_MODE=1`",
    }.get(path, "Check its log")
    raise SamplerError(
        f"The vLLM server at {url} answers {path} with {response.status_code}: {response.text[:500]}. {advice}."
    )


def _is_up(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=10.0).status_code == 200
    except httpx2.HTTPError:
        return False


def _wait_for(url: str, deadline: float) -> None:
    """Wait until a server is up."""
    while True:
        try:
            if httpx2.get(f"{url}/health", timeout=10.0).status_code == 200:
                return
            reason = "it is not healthy"
        except httpx2.HTTPError as error:
            reason = repr(error)
        if time.monotonic() > deadline:
            raise SamplerError(
                f"The vLLM server at {url} is not up ({reason}). Start it with `vllm serve MODEL --logprobs-mode "
                "processed_logprobs`, or raise `vllm_server_timeout`."
            )
        time.sleep(1.0)
