from dataclasses import dataclass
from pathlib import Path

from openrlhf_dbb.evaluation import results


@dataclass(frozen=True)
class Options:
    """Holds the settings of an evaluation. The flags of ``evaluate`` have these names; their help explains them."""

    model: str
    benchmarks: str
    n: int = 8
    runs: int = 4
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int | None = None
    seed: int = 0
    limit: int | None = None
    chat_template: bool | None = None
    engines: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    verbose: bool = False
    output: Path = results.FOLDER
    name: str | None = None
    run: str | None = None
    store_url: str | None = None
    trust_remote_code: bool = False
