"""Installs and starts small but real prefill-decode (PD) servers on a CPU.

    python tests/live/stack.py install dynamo --into DIR
    python tests/live/stack.py up dynamo --from DIR -- COMMAND ...

`up` starts a prefill server P, a decode server D and a router, waits until a request has really
gone through all three, prints where they are as one line of JSON, runs COMMAND and takes everything
down again. COMMAND finds them in its environment (RELAYBENCH_URL and more: `Servers.environment`);
the exit code is COMMAND's. Without a COMMAND it serves until Ctrl-C.

In a test: `with stack.up("dynamo", folder) as servers: ...`. Only the standard library is needed.
"""
# ruff: noqa: T201 - a command line prints

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import fcntl
import hashlib
import http.client
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, cast, get_args
from urllib.parse import urlsplit

Stack = Literal["vllm", "sglang", "dynamo"]
Bundle = Literal["dynamo", "engines"]
Connector = Literal["nixl", "example"]

HERE = Path(__file__).resolve().parent
MODEL = "tiny"
CONTEXT_TOKENS = 4096
VOCABULARY = 4096
KV_TOKENS = 65536
BLOCK_TOKENS = 32
WARM_UP_TOKENS = range(VOCABULARY - 3 * BLOCK_TOKENS, VOCABULARY)

# What pip is asked for, one call after the other. The last lists' own requirements name CUDA builds
# (or, for Dynamo, much that is not used); what they do need stands in the lists before.
PIP: dict[Bundle, list[list[str]]] = {
    "dynamo": [["--no-deps", "-r", "dynamo.txt"]],
    "engines": [
        ["-r", "vllm.txt", "-r", "sglang.txt", "-c", "engines-constraints.txt"],
        ["--no-deps", "-r", "engines-no-deps.txt"],
    ],
}


class StackError(Exception):
    """A stack could not be installed or did not come up; the message says what to do."""


@dataclass(frozen=True)
class Servers:
    """Where a running stack is. `metrics` and `pids` have the keys router, prefill, decode."""

    stack: Stack
    model: str
    tokenizer: str
    context_tokens: int
    router: str
    prefill: str
    decode: str
    metrics: dict[str, str]
    private_network: bool = False
    pids: dict[str, int] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        """What COMMAND finds in its environment."""
        roles = {"ROUTER": "router", "P": "prefill", "D": "decode"}
        return {
            "RELAYBENCH_STACK": self.stack,
            "RELAYBENCH_MODEL": self.model,
            "RELAYBENCH_TOKENIZER": self.tokenizer,
            "RELAYBENCH_CONTEXT_TOKENS": str(self.context_tokens),
            "RELAYBENCH_URL": self.router,
            "RELAYBENCH_P": self.prefill,
            "RELAYBENCH_D": self.decode,
            **{f"RELAYBENCH_METRICS_{short}": self.metrics[role] for short, role in roles.items()},
            **{f"RELAYBENCH_PID_{short}": str(self.pids[role]) for short, role in roles.items()},
        }


@dataclass(frozen=True)
class Plan:
    """How to start one stack, and how to tell that it serves."""

    servers: Servers
    commands: dict[str, list[str]]  # by role
    environment: dict[str, str]
    own_environment: dict[str, dict[str, str]]  # by role
    ready: list[str]  # answer 200 when the servers are up; only then is the warm-up sent
    warm_up: tuple[str, dict[str, Any]]  # path and body
    proof: Callable[[Any], bool]  # of the answer to the warm-up: P prefilled, D decoded
    patience_s: float


# --------------------------------------------------------------------------------------- install


def install(bundle: Bundle, folder: Path) -> None:
    """Makes `folder`/venv and `folder`/model; returns at once when they are there and current."""
    folder = folder.resolve()  # pip runs elsewhere
    folder.mkdir(parents=True, exist_ok=True)
    stamp, wanted = folder / "installed.txt", _digest(bundle)
    if stamp.exists() and stamp.read_text() == wanted:
        _say(f"{bundle} is already installed in {folder}")
        return
    stamp.unlink(missing_ok=True)
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder / "venv")], check=True)
    pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet"]
    for arguments in PIP[bundle]:
        # The lists are named relative to this folder.
        subprocess.run(
            [*pip, "--disable-pip-version-check", *arguments],
            cwd=HERE,
            env=_clean_environment(),
            check=True,
        )
    write_model(folder / "model")
    stamp.write_text(wanted)
    _say(f"installed {bundle} in {folder} in {time.monotonic() - began_s:.0f} s")


def _digest(bundle: Bundle) -> str:
    lists = [word for step in PIP[bundle] for word in step if word.endswith(".txt")]
    content = [sys.version, *((HERE / name).read_text() for name in lists), json.dumps(_model())]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()


def write_model(folder: Path) -> None:
    """Writes a two-layer model without weights; its tokenizer has one word a token.

    So a prompt of N words is N tokens, and each generated token is a visible word.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _model().items():
        (folder / name).write_text(json.dumps(content))


def _model() -> dict[str, dict[str, Any]]:
    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]
    words = [*special, "system", "user", "assistant"]
    words += [f"w{number}" for number in range(VOCABULARY - len(words))]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    turn = "<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> "
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": number, "content": word, **plain, "special": True}
                for number, word in enumerate(special)
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {
                "type": "WordLevel",
                "vocab": {word: number for number, word in enumerate(words)},
                "unk_token": "<unk>",
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "TokenizersBackend",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "model_max_length": CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
            "chat_template": "{% for m in messages %}" + turn + "{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}",
        },
        "config.json": {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 0.125,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": CONTEXT_TOKENS,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        },
        "generation_config.json": {"eos_token_id": 2, "pad_token_id": 0},
    }


# ----------------------------------------------------------------------------------- three stacks


def _dynamo(folder: Path, scratch: Path) -> Plan:
    """Dynamo's own frontend in front of its mock engine, once as prefill and once as decode."""
    router, prefill, decode, bootstrap = free_ports(4)
    python = str(folder / "venv/bin/python")
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    mocker = [python, "-m", "dynamo.mocker", *planes, "--engine-type", "vllm"]
    mocker += ["--model-path", str(folder / "model"), "--model-name", MODEL]
    mocker += ["--max-model-len", str(CONTEXT_TOKENS), "--block-size", str(BLOCK_TOKENS)]
    mocker += ["--num-gpu-blocks-override", str(KV_TOKENS // BLOCK_TOKENS)]
    frontend = [python, "-m", "dynamo.frontend", *planes, "--router-mode", "kv"]
    frontend += ["--http-host", "127.0.0.1", "--http-port", str(router)]
    return Plan(
        _servers("dynamo", folder, (router, prefill, decode), router_metrics=router),
        {
            "router": frontend,
            "prefill": [
                *mocker,
                *("--disaggregation-mode", "prefill", "--bootstrap-ports", str(bootstrap)),
            ],
            "decode": [*mocker, "--disaggregation-mode", "decode"],
        },
        {
            "DYN_FILE_KV": str(scratch),
            "DYN_SYSTEM_HOST": "127.0.0.1",
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1",
            "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',  # else /health is 503 for ever
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        },
        {
            "prefill": {"DYN_SYSTEM_PORT": str(prefill)},
            "decode": {"DYN_SYSTEM_PORT": str(decode)},
        },
        [_url(prefill, "/health"), _url(decode, "/health"), _url(router, "/v1/models")],
        ("/v1/completions", {**_COMPLETION, "nvext": {"extra_fields": ["worker_id"]}}),
        _named_two_workers,
        patience_s=60,
    )


def _named_two_workers(answer: Any) -> bool:
    workers = (answer.get("nvext") or {}).get("worker_id") or {}
    prefill, decode = workers.get("prefill_worker_id"), workers.get("decode_worker_id")
    return prefill is not None and decode is not None and prefill != decode


def _vllm(folder: Path, scratch: Path, connector: Connector) -> Plan:
    """vLLM's CPU build twice, behind vLLM's router; NIXL or a shared folder carries the KV."""
    router, router_metrics, prefill, decode, prefill_side, decode_side = free_ports(6)
    bin_ = folder / "venv/bin"
    server = [str(bin_ / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    server += ["--model", str(folder / "model"), "--served-model-name", MODEL]
    server += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--load-format", "dummy"]
    server += ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "16", "--enforce-eager"]
    server += ["--block-size", str(BLOCK_TOKENS)]
    server += ["--num-gpu-blocks-override", str(KV_TOKENS // BLOCK_TOKENS)]
    server += ["--enable-prompt-tokens-details", "--enable-per-request-metrics"]

    def transfer(role: str) -> list[str]:
        settings: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": role}
        settings |= {"kv_buffer_device": "cpu"}
        if connector == "example":
            settings = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
            settings |= {"kv_connector_extra_config": {"shared_storage_path": str(scratch)}}
        return ["--kv-transfer-config", json.dumps(settings)]

    if connector == "example":  # it writes a prompt as one piece, and D dies of half a prompt
        server += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(CONTEXT_TOKENS)]
    servers = _servers("vllm", folder, (router, prefill, decode), router_metrics=router_metrics)
    return Plan(
        servers,
        {
            "prefill": [*server, "--port", str(prefill), *transfer("kv_producer")],
            "decode": [*server, "--port", str(decode), *transfer("kv_consumer")],
            "router": [
                *(str(bin_ / "vllm-router"), "--vllm-pd-disaggregation", "--policy", "round_robin"),
                *("--kv-connector", "nixl", "--host", "127.0.0.1", "--port", str(router)),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(router_metrics)),
                *("--prefill", _url(prefill), "--decode", _url(decode)),
            ],
        },
        {
            "PYTHONPATH": str(HERE / "shims"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_SERVER_DEV_MODE": "1",  # gives /reset_prefix_cache
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
            "OMP_NUM_THREADS": "1",
        },
        {
            "prefill": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(prefill_side)},
            "decode": {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(decode_side)},
        },
        [_url(prefill, "/health"), _url(decode, "/health"), _url(router, "/readiness")],
        ("/v1/completions", _COMPLETION),
        lambda _: _external_tokens(servers.metrics["decode"]) > 0,
        patience_s=600,
    )


def _external_tokens(metrics_url: str) -> float:
    """The prompt tokens that a vLLM server took over from another instead of computing them."""
    name = "vllm:prompt_tokens_by_source_total"
    return sample(metrics_url, name, source="external_kv_transfer")


def _sglang(folder: Path) -> Plan:
    """SGLang on a CPU twice, behind SGLang's router; Mooncake's TCP transport carries the KV.

    Only kernels are stand-ins (`shims`): scheduler, cache, bootstrap and transfer are stock.
    """
    if ctypes.util.find_library("ibverbs") is None:
        raise StackError("SGLang's KV transport needs libibverbs: apt-get install libibverbs1")
    router, router_metrics, prefill, decode, bootstrap = free_ports(5)
    python = str(folder / "venv/bin/python")
    server = [python, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--device", "cpu"]
    server += ["--model-path", str(folder / "model"), "--served-model-name", MODEL]
    server += ["--dtype", "bfloat16", "--load-format", "dummy"]
    server += ["--context-length", str(CONTEXT_TOKENS), "--max-total-tokens", str(KV_TOKENS)]
    server += ["--max-running-requests", "16", "--enable-metrics", "--enable-cache-report"]
    server += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
    server += ["--disable-overlap-schedule", "--disaggregation-transfer-backend", "mooncake_tcp"]
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    servers = _servers("sglang", folder, (router, prefill, decode), router_metrics=router_metrics)
    return Plan(
        servers,
        {
            "prefill": [
                *(*server, "--port", str(prefill), "--disaggregation-mode", "prefill"),
                *("--disaggregation-bootstrap-port", str(bootstrap)),
            ],
            "decode": [
                *(*server, "--port", str(decode), "--disaggregation-mode", "decode"),
                *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
            ],
            "router": [
                *(python, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
                *("--host", "127.0.0.1", "--port", str(router), "--policy", "round_robin"),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(router_metrics)),
                *("--prefill", _url(prefill), str(bootstrap), "--decode", _url(decode)),
            ],
        },
        {
            "PYTHONPATH": str(HERE / "shims"),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "0",
            "SGLANG_HOST_IP": "127.0.0.1",
            "HOST_IP": "127.0.0.1",
            "MC_FORCE_TCP": "1",
            "OMP_NUM_THREADS": "1",
        },
        {},
        [_url(router, "/readiness")],
        ("/generate", {"input_ids": list(WARM_UP_TOKENS), "sampling_params": sampling}),
        lambda _: sample(servers.metrics["prefill"], "sglang:kv_transfer_total_mb_count") > 0,
        patience_s=600,
    )


_COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": list(WARM_UP_TOKENS),
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}


def _servers(
    stack: Stack, folder: Path, ports: tuple[int, int, int], *, router_metrics: int
) -> Servers:
    router, prefill, decode = ports
    metrics = {"router": router_metrics, "prefill": prefill, "decode": decode}
    return Servers(
        stack,
        MODEL,
        str(folder / "model"),
        CONTEXT_TOKENS,
        _url(router),
        _url(prefill),
        _url(decode),
        {role: _url(port, "/metrics") for role, port in metrics.items()},
    )


# -------------------------------------------------------------------------------------------- up


@contextmanager
def up(stack: Stack, folder: Path, *, connector: Connector = "nixl") -> Iterator[Servers]:
    """Starts a stack installed in `folder`, yields where it is once it serves, takes it down.

    While it runs, this thread may be in a network namespace of its own (`private_network`): what it
    starts, threads too, reaches the servers and nothing else; older threads of this process do not
    reach them. So a fixture should end with the module that needs it.
    Raises `StackError` when the stack does not come up, with the end of the log that tells why.
    """
    folder = folder.resolve()
    if not (folder / "installed.txt").exists():
        bundle = "dynamo" if stack == "dynamo" else "engines"
        raise StackError(f"nothing is installed in {folder}: run `install {bundle} --into` first")
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="relaybench-")))
        plan = _plan(stack, folder, scratch, connector)
        private = cleanup.enter_context(only_loopback())
        if not private:
            _say("no network namespace (takes root): some helper sockets listen on all interfaces")
        logs = folder / "logs" / f"{stack}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        logs.mkdir(parents=True, exist_ok=True)
        processes: dict[str, subprocess.Popen[bytes]] = {}
        cleanup.callback(lambda: _stop(processes.values()))
        began_s = time.monotonic()
        for role, command in plan.commands.items():
            processes[role] = _start(command, _environment(plan, role, folder), logs, role)
        _wait(plan, processes, logs)
        took_s = time.monotonic() - began_s
        memory_gib = sum(map(_resident_bytes, processes.values())) / 2**30
        _say(f"{stack} is up after {took_s:.1f} s, {memory_gib:.2f} GiB resident, logs in {logs}")
        servers = {**vars(plan.servers), "private_network": private}
        yield Servers(**{**servers, "pids": {role: p.pid for role, p in processes.items()}})


def _plan(stack: Stack, folder: Path, scratch: Path, connector: Connector) -> Plan:
    if stack == "dynamo":
        return _dynamo(folder, scratch)
    return _vllm(folder, scratch, connector) if stack == "vllm" else _sglang(folder)


def _environment(plan: Plan, role: str, folder: Path) -> dict[str, str]:
    path = f"{folder / 'venv/bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    ours = {"PATH": path, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "NO_PROXY": "127.0.0.1"}
    theirs = plan.environment | plan.own_environment.get(role, {})
    return _clean_environment() | ours | theirs


def _clean_environment() -> dict[str, str]:
    """This process's environment, less what would send another interpreter to its modules."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _start(
    command: Sequence[str], environment: Mapping[str, str], logs: Path, role: str
) -> subprocess.Popen[bytes]:
    with (logs / f"{role}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its whole group can be ended
        )


def _wait(plan: Plan, processes: Mapping[str, subprocess.Popen[bytes]], logs: Path) -> None:
    """Returns when a request has gone through P and D; raises `StackError` when none will."""
    deadline_s = time.monotonic() + plan.patience_s
    waits_for = list(plan.ready)
    while True:
        for role, process in processes.items():
            if process.poll() is not None:
                _fail(f"{role} ended with exit code {process.returncode}", logs, [role])
        while waits_for and _answers(waits_for[0]):
            del waits_for[0]
        if not waits_for and _warm_up(plan):
            return
        if time.monotonic() > deadline_s:
            what = waits_for[0] if waits_for else "a request through prefill and decode"
            _fail(f"no answer to {what} in {plan.patience_s:.0f} s", logs, list(processes))
        time.sleep(0.1)


def _answers(url: str) -> bool:
    with suppress(OSError, http.client.HTTPException):
        return fetch(url, timeout_s=5)[0] == http.client.OK
    return False


def _warm_up(plan: Plan) -> bool:
    path, body = plan.warm_up
    # The first forward pass takes seconds, and longer on a busy machine.
    with suppress(OSError, http.client.HTTPException, ValueError):
        status, answer = fetch(plan.servers.router + path, body, timeout_s=60)
        return status == http.client.OK and plan.proof(json.loads(answer))
    return False


def _fail(what: str, logs: Path, roles: Sequence[str]) -> NoReturn:
    lines = 40 // len(roles)
    tails = []
    for role in roles:
        log = logs / f"{role}.log"
        tails += [f"--- the end of {log}", *log.read_text(errors="replace").splitlines()[-lines:]]
    raise StackError("\n".join([what, *tails]))


def _stop(processes: Iterable[subprocess.Popen[bytes]], patience_s: float = 10) -> None:
    """Ends whole process groups: asks, waits, kills."""
    groups = list(processes)
    try:
        for process in groups:
            _signal(process, signal.SIGTERM)
        deadline_s = time.monotonic() + patience_s
        while any(_signal(process, 0) for process in groups) and time.monotonic() < deadline_s:
            time.sleep(0.05)
    finally:  # a second Ctrl-C too
        for process in groups:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether there is still someone in the process's group to get the signal."""
    process.poll()  # a leader that ended is no one
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        return True
    return False


def _resident_bytes(process: subprocess.Popen[bytes]) -> int:
    """What a process and all in its group hold in memory."""
    pages = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(folder.name)) == process.pid:
                pages += int((folder / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --------------------------------------------------------------------------------------- network


def free_ports(count: int) -> list[int]:
    """Distinct ports that nobody listens on.

    They lie below the range that the kernel draws from: an engine binds its port only after a
    minute, and until then its own helpers, and other programs, would be handed one from there.
    """
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20000, 32000)  # noqa: S311 - nothing secret
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.add(port)
    return sorted(ports)


def _url(port: int, path: str = "") -> str:
    return f"http://127.0.0.1:{port}{path}"


def fetch(url: str, body: Any = None, *, timeout_s: float = 60) -> tuple[int, bytes]:
    """The status and content of the answer to a GET, or to a POST of `body` as JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=timeout_s)
    with closing(connection):
        if body is None:
            connection.request("GET", parts.path)
        else:
            as_json = {"content-type": "application/json"}
            connection.request("POST", parts.path, json.dumps(body), as_json)
        answer = connection.getresponse()
        return answer.status, answer.read()


def sample(metrics_url: str, name: str, **labels: str) -> float:
    """The sum of a Prometheus metric's samples that have the given labels; 0 without any."""
    line = re.compile(rf"^{re.escape(name)}(?:{{(.*)}})? (\S+)", re.MULTILINE)
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    found = line.findall(fetch(metrics_url)[1].decode())
    has = re.compile(r'\w+="[^"]*"')
    return sum(float(value) for inside, value in found if wanted <= set(has.findall(inside)))


@contextmanager
def only_loopback() -> Iterator[bool]:
    """Moves this thread, and what it starts from now on, to a network with nothing but `lo`.

    Yields whether that worked: it takes root's rights.
    """
    new_network, set_flags, up_and_running = 0x40000000, 0x8914, 0x41  # as in the kernel's headers
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open("rb") as before:
        if libc.unshare(new_network) != 0:
            yield False
            return
        try:
            with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as any_socket:
                fcntl.ioctl(any_socket, set_flags, struct.pack("16sH22x", b"lo", up_and_running))
            yield True
        finally:
            libc.setns(before.fileno(), new_network)


# ----------------------------------------------------------------------------------- command line


def _say(what: str) -> None:
    print(f"stack: {what}", file=sys.stderr, flush=True)


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut + 1 :]


def _run(command: Sequence[str], servers: Servers) -> int:
    """COMMAND's exit code, 128 + N when signal N ended it."""
    environment = os.environ | servers.environment()
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        raise StackError(f"cannot run {command[0]}: {error.strerror}") from error
    try:
        code = process.wait()
    finally:
        _stop([process])
    return code if code >= 0 else 128 - code


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of COMMAND; 1 when there was nothing to run it against."""
    parser = argparse.ArgumentParser(description="Real prefill-decode servers on a CPU.")
    actions = parser.add_subparsers(dest="action", required=True)
    installing = actions.add_parser("install", help="make a virtual environment and a tiny model")
    installing.add_argument("bundle", choices=get_args(Bundle), help="engines: vLLM and SGLang")
    installing.add_argument("--into", type=Path, required=True, metavar="DIR")
    starting = actions.add_parser("up", help="start one stack")
    starting.add_argument("stack", choices=get_args(Stack))
    starting.add_argument("--from", dest="folder", type=Path, required=True, metavar="DIR")
    starting.add_argument("--connector", choices=get_args(Connector), default="nixl")
    starting.usage = f"{starting.format_usage().strip()[len('usage: ') :]} [-- COMMAND ...]"
    words, command = _split(sys.argv[1:] if arguments is None else arguments)
    chosen = parser.parse_args(words)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    try:
        if chosen.action == "install":
            install(cast("Bundle", chosen.bundle), chosen.into)
            return 0
        with up(chosen.stack, chosen.folder, connector=chosen.connector) as servers:
            print(json.dumps(asdict(servers)), flush=True)
            if command:
                return _run(command, servers)
            signal.pause()
            return 0
    except (StackError, subprocess.CalledProcessError) as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
