"""What runs would cost in completions, tokens, memory and disk, from their configurations alone.

Nothing is loaded. Prompts' tokens are not known without a tokenizer and are in none of the figures.
A figure that is not known is None.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from grpo_ustat.config.model import ModelConfig, ModelSize, model_folder
from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.train import TrainConfig
from grpo_ustat.estimators.baselines import BASELINES, OF_THE_BATCH
from grpo_ustat.policy.limits import LOGIT_BYTES, pass_bytes

ENTRY = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number
MOMENTS = {"adamw": 2, "sgd": 0}  # numbers that the optimizer stores for a parameter
PUBLISHED = {  # test questions by hub id and subset, as their cards and papers give them
    ("openai/gsm8k", "main"): 1319,  # Cobbe et al. 2021
    ("DigitalLearningGmbH/MATH-lighteval", "default"): 5000,  # Hendrycks et al. 2021
    ("HuggingFaceH4/MATH-500", None): 500,  # Lightman et al. 2023
}
HEADER = 1000  # bytes of a safetensors file beside its arrays, about
PROCESS = 580_000_000  # bytes of Python with PyTorch, transformers and tasks; on a GPU none of them
READ = 2.5  # times its files that a pool takes in the process that reads them
RAGGED = 1 / 4  # of micro_batch_tokens in a pass, where answers differ in length: from 1/8 to all
GRAPH_ROOM = 96  # columns of rollout/graphs.py beyond prompt and completion, on average
HELD = 4.5  # times a chunk of logits that their log-probabilities and derivatives hold
WHOLE = 32 * 2**30  # bytes of a graph from which on scores are taken layer by layer: half of a GPU


@dataclass(frozen=True)
class Cost:
    """What one run costs; bytes are of one process.

    Attributes:
        rollouts: completions that gradients or errors are computed from.
        values: fresh completions behind V, b* or a tracker, and greedy ones of remax; at most.
        evaluation: completions of test questions; None where their number is unknown.
        tokens: of all these completions, at most.
        weights: bytes of the model.
        reference: bytes of its frozen copy, 0 without one.
        training: bytes of gradients and optimizer.
        process: bytes of the program itself on a CPU, 0 on a GPU.
        signs: bytes of the random signs behind a study's sketches.
        cache: bytes of keys and values of the completions sampled side by side, 0 where vLLM does.
        logits: bytes of the most logits at a time, and what is computed from them.
        pool: bytes of a study's pool in the process that reads it, 0 on a GPU.
        graph: bytes of activations that one backward pass holds: of an update, or of a question's
            scores.
        disk: bytes at most, while it runs: checkpoints, or the study's pool.
        disk_after: bytes of them that stay when it has finished.
    """

    rollouts: int
    values: int
    evaluation: int | None
    tokens: int
    weights: int | None
    reference: int | None
    training: int | None
    process: int
    signs: int | None
    cache: int | None
    logits: int | None
    graph: int | None
    pool: int | None
    disk: int | None
    disk_after: int | None

    @property
    def memory(self) -> int | None:
        """Bytes of all these together at the most: while completions are sampled, or in a backward
        pass; of a study's first process where that is more.
        """
        if self.cache is None or self.graph is None:
            return None
        most = max(self.cache, self.graph)
        parts = [self.weights, self.reference, self.training, self.signs, self.logits]
        working = _sum([self.process, most, *parts])
        return None if working is None else max(working, self.process + (self.pool or 0))


def cost(config: TrainConfig | MseConfig) -> Cost:
    """What a run costs, see `train_cost` and `study_cost`."""
    return train_cost(config) if isinstance(config, TrainConfig) else study_cost(config)


def train_cost(config: TrainConfig) -> Cost:
    """n completions a step; evaluations at step 0, every eval_steps and the last.

    Values, at most, per step and prompt: budget.value_completions for `oracle` and `optimal`, one
    greedy for `remax`; `spo` spends budget.value_completions on a prompt's first visit.

    Bytes, for P parameters of E bytes: weights E P; a reference E P with a penalty, none with
    adapters; training E P (1 + 2) with AdamW, so 16 P in all in float32, 0 with adapters, whose few
    parameters are not counted. A checkpoint has E P (1 + 2); while one is written there are
    save_total_limit + 1, afterwards save_total_limit.
    """
    needs, each = BASELINES[config.baseline.name].needs, config.budget.value_completions
    visits = config.prompts_per_step * config.max_steps
    values = visits * (each * bool(needs & {"value_P", "optimal_P"}) + ("greedy_P" in needs))
    if "tracker_P" in needs:
        values += each * min(visits, config.dataset.train_size or visits)

    evaluations = 1 + math.ceil(config.max_steps / config.eval_steps)
    decoding = config.eval.decoding
    of_question = config.eval.num_generations * ("sampled" in decoding) + ("greedy" in decoding)
    tests = _product(count_test_questions(config), of_question * evaluations)
    rollouts = config.budget.rollouts * config.max_steps
    tokens = (rollouts + values + (tests or 0)) * config.max_completion_length

    size, entry, lora = model_size(config.model), ENTRY[config.model.dtype], config.lora.r > 0
    weights = _product(size.parameters, entry)
    trained = 0 if lora else 1 + MOMENTS[config.optimizer.name]  # gradient, moments
    checkpoints, limit = math.ceil(config.max_steps / config.save_steps), config.save_total_limit
    most = checkpoints if limit is None else min(checkpoints, limit + 1)
    last = checkpoints if limit is None else min(checkpoints, limit)
    side = max(config.budget.rollouts, (tests or 0) // evaluations)
    update = math.ceil(config.objective.update_size(config.budget.rollouts) / processes(config))
    whole = update * config.max_completion_length
    pass_tokens = int(min(RAGGED * config.micro_batch_tokens, whole))
    computed = 2 if config.bf16 else entry
    graph = _graph(size, pass_tokens, computed, by_layer=config.gradient_checkpointing)
    return Cost(
        rollouts=rollouts,
        values=values,
        evaluation=tests,
        tokens=tokens,
        weights=weights,
        reference=_product(weights, bool(config.objective.beta and not lora)),
        training=_product(weights, trained),
        process=_process(config),
        signs=0,
        cache=_cache(config, size, side, 2 if config.bf16 else entry),
        logits=_logits(config, size, side, pass_tokens),
        graph=_sum([graph, _product(size.parameters, 2 * config.bf16)]),  # autocast's weights
        pool=0,
        disk=_product(weights, trained * most),
        disk_after=_product(weights, trained * last),
    )


def count_test_questions(config: TrainConfig) -> int | None:
    """`dataset.test_size`, or where it is null the published size; None where that is unknown."""
    size = config.dataset.test_size
    return published_size(config) if size is None else size


def published_size(config: TrainConfig) -> int | None:
    """Number of all test questions, where `dataset` names a hub id of PUBLISHED and filters
    nothing.
    """
    dataset = config.dataset
    if dataset.kind not in ("gsm8k", "math") or dataset.test_split != "test":
        return None
    if dataset.kind == "math" and (dataset.filter_test or dataset.test_ids is not None):
        return None
    source = (dataset.path, dataset.subset) if dataset.test_path is None else None
    return PUBLISHED.get(source or (dataset.test_path, None))


def study_cost(config: MseConfig) -> Cost:
    """N completions of each question, up to max_pool_completions with target_halfwidth.

    monte_carlo adds, a question: `replicates` groups of the largest size and
    reference_completions, and value_completions where a baseline needs them. Bytes, for P
    parameters of E bytes: weights E P in each worker; a question's file has 8 N^2 for inner
    products, 4 N R and 8 R' for sketches of R = feature_sketch and R' = gradient_sketch numbers (P
    where that is smaller), 4 N tokens, 17 N for rewards, lengths and ends. The scores of a question
    hold the graph of N completions, layer by layer where that is more than `WHOLE`; where a
    sketch is smaller than P, each parameter has a sign of one bit. AdamW's metric holds a
    gradient and the factors of every entry beside the weights, or on a CPU the six sums of group
    gradients of both halves, and keeps these and a second pool.
    """
    budget, size = config.budget, model_size(config.model)
    questions = 0 if config.imports_pool else config.study.questions or config.dataset.study_size
    fixed = config.target_halfwidth is None
    count = budget.pool_completions if fixed else budget.max_pool_completions

    needs = frozenset().union(*(BASELINES[name].needs for name in config.baselines))
    of_errors, of_baselines = count, int("greedy_P" in needs)
    if "monte_carlo" in config.study.methods:
        of_errors += budget.replicates * max(config.group_sizes) + budget.reference_completions
        if needs - OF_THE_BATCH:
            of_baselines += budget.value_completions + ("greedy_P" in needs)

    most = math.inf if size.parameters is None else size.parameters
    features, gradients = min(budget.feature_sketch, most), min(budget.gradient_sketch, most)
    row = 8 * count + 4 * features + 4 * config.max_completion_length + 17
    disk = _product(questions, int(count * row + 8 * gradients + HEADER))
    beside = 0  # bytes for a parameter
    if config.study.metric == "adam":
        moment = max(ENTRY[config.model.dtype], ENTRY["float32"])
        disk = _sum([disk, disk, _product(size.parameters, 6 * moment)])
        beside = (6 if config.launch.device == "cpu" else 2) * moment
    rollouts, values = questions * of_errors, questions * of_baselines
    entry, tokens = ENTRY[config.model.dtype], count * config.max_completion_length
    graph = _graph(size, tokens, entry)
    if graph is not None and graph > WHOLE:
        graph = _graph(size, tokens, entry, by_layer=True)
    sketches = (budget.feature_sketch, budget.gradient_sketch)
    return Cost(
        rollouts=rollouts,
        values=values,
        evaluation=0,
        tokens=(rollouts + values) * config.max_completion_length,
        weights=_product(size.parameters, ENTRY[config.model.dtype] + beside),
        reference=0,
        training=0,
        process=_process(config),
        signs=_product(size.parameters and -(-size.parameters // 8), int(most > min(sketches))),
        cache=_cache(config, size, questions * count, entry),
        logits=_logits(config, size, questions * count, tokens),
        graph=graph,
        pool=int(READ * disk) if config.launch.device == "cpu" and disk is not None else 0,
        disk=disk,
        disk_after=disk,
    )


def score_memory(config: MseConfig) -> tuple[int, int, int] | None:
    """Bytes of scoring N completions of a question, beside the weights: with the whole graph, layer
    by layer, and of one completion layer by layer; prompts left out. None where the sizes are
    unknown.
    """
    size, length = model_size(config.model), config.max_completion_length
    layers, hidden, inner = size.layers, size.hidden, size.inner
    if layers is None or hidden is None or not isinstance(inner, int):
        return None
    shape = (ENTRY[config.model.dtype], layers, hidden, inner)
    many = config.budget.pool_completions * length
    return (
        pass_bytes(many, *shape, by_layer=False),
        pass_bytes(many, *shape, by_layer=True),
        pass_bytes(length, *shape, by_layer=True),
    )


def sharded_memory(largest: Cost, processes: int) -> tuple[int, int]:
    """Under FSDP2 on each process: bytes of shards, and of what stays whole while it samples.

    Weights, gradients and optimizer are sharded; weights are gathered to sample; a reference is
    whole throughout. All three must be known.
    """
    weights, training, reference = largest.weights, largest.training, largest.reference
    assert weights is not None and training is not None and reference is not None
    return (weights + training) // processes, weights + reference


def total(costs: list[Cost]) -> Cost:
    """Total of runs executed one after another: tokens add up, memory is the maximum, disk is what
    all keep and the largest temporary need beside it.
    """
    names = ("rollouts", "values", "evaluation", "tokens", "disk_after")
    sums = {name: _sum([getattr(one, name) for one in costs]) for name in names}
    extra = [
        None if one.disk is None or one.disk_after is None else one.disk - one.disk_after
        for one in costs
    ]
    numbers = [one for one in extra if one is not None]
    disk = _sum([sums["disk_after"], max(numbers)]) if len(numbers) == len(extra) else None
    return replace(max(costs, key=lambda one: one.memory or 0), disk=disk, **sums)


def model_size(model: ModelConfig) -> ModelSize:
    """`model.size`; what it leaves open from the model's folder where there is one: from
    config.json, in the names of Llama and its kin, and from the headers of the weight files, which
    store tied weights once.
    """
    folder = model_folder(model.model_name_or_path)
    if not (folder / "config.json").is_file():
        return model.size
    from safetensors import safe_open

    parameters = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
            parameters += sum(map(math.prod, shapes))
    stored = json.loads((folder / "config.json").read_text())
    heads = stored.get("num_key_value_heads") or stored.get("num_attention_heads")
    width = stored.get("head_dim")
    if width is None and stored.get("num_attention_heads"):
        width = stored["hidden_size"] // stored["num_attention_heads"]
    of_folder = ModelSize(
        parameters=parameters or None,
        layers=stored.get("num_hidden_layers"),
        kv_width=None if heads is None or width is None else heads * width,
        vocabulary=stored.get("vocab_size"),
        hidden=stored.get("hidden_size"),
        inner=stored.get("intermediate_size"),
    )
    configured = {key: value for key, value in vars(model.size).items() if value is not None}
    return replace(of_folder, **configured)


def _cache(config: Any, size: ModelSize, side: int, computed: int) -> int | None:
    """Bytes of keys and values of the completions sampled side by side, prompts and room to grow
    left out; CUDA graphs have buffers for the longest completion and `GRAPH_ROOM` more.

    A token leaves kv_width keys and as many values in each layer; keys have passed through rotary
    embeddings, in the weights' type, values have the type of the computation.

    Args:
        side: completions to sample, of which at most `rollout_batch_size` at a time.
        computed: bytes of a number of the computation.
    """
    if config.rollout.name != "local":
        return 0
    if size.layers is None or size.kv_width is None:
        return None
    row = size.layers * size.kv_width * (ENTRY[config.model.dtype] + computed)
    graphs = config.launch.device.startswith("cuda") and bool(config.rollout.cuda_graphs)
    columns = config.max_completion_length + GRAPH_ROOM * graphs
    return min(config.rollout_batch_size, side) * row * columns


def _logits(config: Any, size: ModelSize, side: int, tokens: int) -> int | None:
    """Bytes of float32 logits: of the next token of all rows, or of one chunk of those of
    log-probabilities with all that is computed from them, whichever is more.

    Args:
        side: completions to sample.
        tokens: of a backward pass.
    """
    if size.vocabulary is None:
        return None
    rows = min(config.rollout_batch_size, side)
    chunk = LOGIT_BYTES["cuda" if config.launch.device.startswith("cuda") else "cpu"]
    whole = 4 * size.vocabulary * tokens
    return max(4 * size.vocabulary * rows, int(HELD * min(chunk, whole)))


def _graph(size: ModelSize, tokens: int, entry: int, by_layer: bool = False) -> int | None:
    """Bytes of activations that a backward pass over so many tokens holds, as
    `policy.memory.score_bytes` counts them.

    Args:
        entry: bytes of a number of the computation.
        by_layer: whether the graph of one layer is held at a time, beside the inputs of all.
    """
    if size.layers is None or size.hidden is None or size.inner is None:
        return None
    layer = 16 * size.hidden + 4 * size.inner
    held = layer + size.layers * size.hidden if by_layer else size.layers * layer
    return entry * tokens * held


def processes(config: TrainConfig | MseConfig) -> int:
    """How many processes share out a run: its ranks, or the local workers of a study."""
    if config.launch.num_processes > 1 or isinstance(config, TrainConfig):
        return config.launch.num_processes
    return config.sampling_workers


def _process(config: TrainConfig | MseConfig) -> int:
    return PROCESS if config.launch.device == "cpu" else 0


def _product(number: int | None, factor: int) -> int | None:
    return None if number is None else number * factor


def _sum(numbers: list[int | None]) -> int | None:
    values = [number for number in numbers if number is not None]
    return sum(values) if len(values) == len(numbers) else None
