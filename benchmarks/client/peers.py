"""Load clients, one function each: how it is started on a load, and how its own account is read.

Every one is given what it does best with: the plainest prompts it takes, token counts from the
server's usage where it can, no screen, no scraping. What each needs to be known of it:

* AIPerf replays Mooncake rows with the text in them. HF_HUB_OFFLINE makes it refuse a tokenizer
  on disk; its `builtin` tokenizer is fetched from the net.
* inference-perf's load type `constant` draws exponential gaps: it is given the same arrivals as a
  trace, so that "late" means the same for all. It lets 100 requests a worker wait or run unless
  told otherwise, and waiting counts from long before they are due.
* GuideLLM keeps no time of a chunk but the first and the last, so it has no gaps to check. It
  starts ten processes however few cores there are: it is given one a core, which it does better
  with.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.result import Run

MODEL = "known"
PROMPT_TOKENS = 100


@dataclass(frozen=True)
class Load:
    """Requests at a constant rate, of `PROMPT_TOKENS` in and `chunks` out."""

    url: str
    rate: int
    seconds: int
    chunks: int
    folder: Path
    """Empty: for what the client is given and what it writes."""
    peers: Path
    """A virtual environment a peer, named as the package."""

    @property
    def due_s(self) -> NDArray[np.float64]:
        """When each request is due, from the first: (requests,)."""
        return np.arange(self.rate * self.seconds) / self.rate

    def lay(self, name: str, rows: Iterator[Mapping[str, Any]]) -> Path:
        """Write rows as JSON lines into the folder."""
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def program(self, package: str) -> str:
        """A peer's command, which each of them names as its package."""
        return str(self.peers / package / "bin" / package)


class Seen(NamedTuple):
    """What a client says of one request, in s."""

    key: str
    """X-Request-Id, or the id in the answer."""
    ttft_s: float
    itl_s: float
    """Mean, from the first token to the last."""
    gaps_s: NDArray[np.float64] | None
    """From each chunk to the next: (chunks - 1,). None: it does not keep them."""


@dataclass(frozen=True)
class Launch:
    """A command, and what reads its records once it has ended."""

    command: list[str]
    read: Callable[[], Iterator[Seen]]
    environment: dict[str, str] = field(default_factory=dict)


def aiperf(load: Load) -> Launch:
    """NVIDIA AIPerf on a Mooncake trace."""
    rows = zip(load.due_s, _prompts(load), strict=True)
    trace = load.lay(
        "trace.jsonl",
        (
            {"timestamp": 1e3 * due_s, "text_input": prompt, "output_length": load.chunks}
            for due_s, prompt in rows
        ),
    )
    out = load.folder / "out"
    command = [load.program("aiperf"), "profile", "--model", MODEL, "--url", load.url]
    command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count"]
    command += ["--input-file", str(trace), "--custom-dataset-type", "mooncake_trace"]
    command += ["--fixed-schedule", "--tokenizer", str(_tokenizer(load.folder)), "--ui", "none"]
    command += ["--no-server-metrics", "--no-gpu-telemetry", "--artifact-dir", str(out)]

    def read() -> Iterator[Seen]:
        for line in (out / "profile_export.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            ms = {name: each["value"] for name, each in row["metrics"].items()}
            yield Seen(
                key=row["metadata"]["x_request_id"],
                ttft_s=ms["time_to_first_token"] / 1e3,
                itl_s=ms["inter_token_latency"] / 1e3,
                gaps_s=np.array(ms["inter_chunk_latency"]) / 1e3,
            )

    return Launch(command, read)


def inference_perf(load: Load) -> Launch:
    """Kubernetes' inference-perf on an Azure trace."""
    began = datetime(2026, 1, 1, tzinfo=UTC)
    stamps = [f"{began + timedelta(seconds=due_s):%Y-%m-%d %H:%M:%S.%f}" for due_s in load.due_s]
    lines = [f"{stamp},{PROMPT_TOKENS},{load.chunks}\n" for stamp in stamps]
    path = load.folder / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines), encoding="utf-8")
    trace = {"file": str(path), "format": "AzurePublicDataset"}
    out = load.folder / "out"
    settings = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "trace": trace},
        "load": {
            "type": "trace_replay",
            "trace": trace,
            "stages": [{"rate": load.rate, "duration": load.seconds}],
            "worker_max_concurrency": len(load.due_s),
        },
        "server": {"type": "vllm", "model_name": MODEL, "base_url": load.url},
        "tokenizer": {"pretrained_model_name_or_path": str(_tokenizer(load.folder))},
        "report": {
            "prometheus": None,
            "request_lifecycle": {
                "per_request": True,
                "per_request_fields": {"response_chunks": False},
                "use_server_output_tokens": True,
            },
        },
        "storage": {"local_storage": {"path": str(out)}},
    }
    config = load.lay("config.yaml", iter([settings]))

    def read() -> Iterator[Seen]:
        report = out / "per_request_lifecycle_metrics.json"
        for row in json.loads(report.read_text(encoding="utf-8")):
            times_s = np.array(row["info"]["response_metrics"]["output_token_times"])
            first_event, _ = row["response"].split("\n", 1)
            yield Seen(
                key=json.loads(first_event.removeprefix("data: "))["id"],
                ttft_s=times_s[0] - row["start_time"],
                itl_s=(times_s[-1] - times_s[0]) / (len(times_s) - 1),
                gaps_s=np.diff(times_s),
            )

    return Launch([load.program("inference-perf"), "-c", str(config)], read)


def guidellm(load: Load) -> Launch:
    """GuideLLM at a constant rate."""
    counts = {"prompt_tokens_count": PROMPT_TOKENS, "output_tokens_count": load.chunks}
    data = load.lay("data.jsonl", ({"prompt": prompt} | counts for prompt in _prompts(load)))
    out = load.folder / "out.json"
    options = {
        "backend": f"kind=openai_http,target={load.url},model={MODEL},"
        f"request_format=/v1/completions,max_tokens={load.chunks}",
        "profile": f"kind=constant,rate={load.rate}",
        "constraint": f"kind=max_requests,count={len(load.due_s)}",
        "tokenizer": f"kind=huggingface_auto,model={_tokenizer(load.folder)}",
        "data": f"kind=json_file,path={data}",
        "output": f"kind=json,path={out}",
    }
    command = [load.program("guidellm"), "run", "--disable-console"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]

    def read() -> Iterator[Seen]:
        report = json.loads(out.read_text(encoding="utf-8"))
        for row in report["benchmarks"][0]["requests"]["successful"]:
            yield Seen(
                key=row["response_id"],
                ttft_s=row["time_to_first_token_ms"] / 1e3,
                itl_s=row["inter_token_latency_ms"] / 1e3,
                gaps_s=None,
            )

    return Launch(command, read, {"GUIDELLM__MAX_WORKER_PROCESSES": str(os.cpu_count())})


def relaybench(load: Load) -> Launch:
    """Ours, on a Mooncake trace, with what is installed beside this interpreter."""
    trace = load.lay(
        "trace.jsonl",
        (
            {
                "timestamp": 1e3 * due_s,
                "input_length": PROMPT_TOKENS,
                "output_length": load.chunks,
                "hash_ids": [turn],
            }
            for turn, due_s in enumerate(load.due_s)
        ),
    )
    out = load.folder / "out"
    command = [sys.executable, "-m", "harness", "run", "trace=mooncake", f"trace.path={trace}"]
    command += ["backend=openai", f"backend.openai.url={load.url}", f"out={out}"]

    def read() -> Iterator[Seen]:
        run = Run.open(out / "openai")
        salt = run.manifest["backend"]["details"]["salt"]
        for row in run.records().to_pylist():
            whole_s = row["last_token_s"] - row["first_token_s"]
            yield Seen(
                key=f"{salt}-{row['turn']}",
                ttft_s=row["first_token_s"] - row["sent_s"],
                itl_s=whole_s / (load.chunks - 1),
                gaps_s=np.array(row["gaps_us"]) / 1e6,
            )

    return Launch(command, read)


OURS = "relaybench"
CLIENTS: dict[str, Callable[[Load], Launch]] = {
    OURS: relaybench,
    "aiperf": aiperf,
    "inference-perf": inference_perf,
    "guidellm": guidellm,
}
"""By the name of the package."""


def _prompts(load: Load) -> Iterator[str]:
    return (f"r{turn}" + " token" * (PROMPT_TOKENS - 1) for turn in range(len(load.due_s)))


def _tokenizer(folder: Path) -> Path:
    """A tokenizer for which a word is a token, so that nothing need be fetched."""
    words = ["<unk>", "token", *(f"w{n}" for n in range(1_000))]
    path = folder / "tokenizer"
    path.mkdir()
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": words[0],
        },
    }
    loaded_by = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": words[0]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(loaded_by), encoding="utf-8")
    return path
