"""A transformers model with a LoRA adapter in this process, for the algorithms that TRL trains.

It keeps the model, its tokenizer and its checkpoints; the steps are TRL's (`algorithms.local`).
Adapters are in PEFT's layout and those of the embedded engine: the same layers, the same scale, the
same first weights from the same seed, so that a checkpoint of the one starts a run on the other.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from pydantic import Field

from backends.base import (
    HUB_NAME,
    BackendParams,
    ModelSpec,
    SamplingClient,
    SavedState,
    Tokenizer,
    held_elsewhere,
)
from backends.errors import Problem, UserError, first_line
from backends.local_layers import ADAPTER, adapted_layers, add_adapter
from backends.local_sampling import LiveSamplingClient
from backends.local_state import read_state, write_state

if TYPE_CHECKING:
    import tinker
    import torch
    from tinker import types as tinker_types

    from backends.base import Backend, ForwardBackwardResult, LossCallable, OptimStepResult

ADAPTER_WEIGHTS = "adapter_model.safetensors"


class LocalParams(BackendParams):
    """How the model computes on this machine."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="Where it computes.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Of the frozen base model; auto is bfloat16 on CUDA, else float32."
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of each process; empty leaves torch's choice, or an even share.",
    )
    num_processes: int = Field(
        1,
        ge=1,
        description="Processes that share each step, through accelerate; one GPU each on CUDA.",
    )

    def weights_problems(self, source: str, where: str) -> list[Problem]:
        """The model is in this process, and reads files only."""
        if not source.startswith("tinker://"):
            return []
        return [held_elsewhere("a local run", source, where)]


class LocalBackend:
    """The model in training, and what is to be kept of it; its steps are taken by a trainer."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        rank: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec
        self.rank = rank
        """Which of the processes that share each step this is; 0 has the run."""
        self.num_processes = num_processes
        self.training_state: Callable[[], Any] | None = None
        """What a trainer has beside the weights (optimizer, random numbers), once there is one."""
        self.resumed: Any = None
        """The same of the checkpoint that the run goes on from; None for a fresh start."""
        self._resumed_weights: Mapping[str, torch.Tensor] = {}
        self.at_close: list[Callable[[], object]] = []
        """What else is to end with it; to be called from any thread, and more than once."""
        self._scratch = tempfile.TemporaryDirectory(prefix="flowtune-local-")
        self.longest = _context(model.config, tokenizer)
        """Tokens of a sequence that the model reads, at most."""

    # -- weights -------------------------------------------------------------------------------

    def take_state(self, state: SavedState | None) -> None:
        """Start from a checkpoint: its weights, and what its trainer had beside them. Blocks."""
        if state is None:
            return
        if state.folder is None:
            raise UserError(held_elsewhere("a local run", state.uri, "model.init_from"))
        self.load_weights(state.folder)
        if state.optimizer:
            self.resumed = read_state(state.folder)
            self._resumed_weights = self.weights()

    def load_weights(self, folder: Path) -> None:
        """Take an adapter in PEFT's layout. Raises UserError if it is another one than this."""
        tensors = _read_adapter(folder)
        here = {name: tensor.shape for name, tensor in self.weights().items()}
        there = {name: tensor.shape for name, tensor in tensors.items()}
        if here != there:
            name = sorted(set(here.items()) ^ set(there.items()))[0][0]
            raise UserError(
                Problem(
                    "model.init_from",
                    f"the adapter in {folder} differs from the one that is trained, in {name}",
                    "set lora_rank, train_attn and train_mlp to what it was made with, and "
                    "train_unembed to false there: TRL trains no adapter on lm_head",
                )
            )
        self.set_weights(tensors)

    def write_start(self, folder: Path) -> None:
        """Write what the run starts or goes on from, for `take_state` of another process."""
        from safetensors.torch import save_file

        save_file(self.weights(), folder / ADAPTER_WEIGHTS)
        if self.resumed is not None:
            write_state(folder, self.resumed)

    def restore_weights(self) -> None:
        """Put the weights of the checkpoint back that the run goes on from."""
        self.set_weights(self._resumed_weights)

    def set_weights(self, weights: Mapping[str, torch.Tensor], adapter: str = ADAPTER) -> None:
        """Give an adapter of the model the weights that `weights` gave out."""
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, dict(weights), adapter_name=adapter)

    def fresh_weights(self) -> None:
        """B is 0 and A uniform in +-1/sqrt(in), drawn from the seed alone, as the engine does."""
        import torch

        generator = torch.Generator()
        generator.manual_seed(self.spec.seed)
        with torch.no_grad():
            for _, module in adapted_layers(self.model):
                a, b = (getattr(module, f"lora_{letter}")[ADAPTER].weight for letter in "AB")
                bound = a.shape[1] ** -0.5
                a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
                b.zero_()

    def weights(self, adapter: str = ADAPTER) -> dict[str, torch.Tensor]:
        """A copy of an adapter's weights, by their names in PEFT's files."""
        from peft import get_peft_model_state_dict

        weights = get_peft_model_state_dict(
            self.model, adapter_name=adapter, save_embedding_layers=False
        )
        return {name: tensor.detach().cpu().clone() for name, tensor in weights.items()}

    # -- what a run asks of a backend ------------------------------------------------------------

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that is trained."""
        return self.tokenizer

    def snapshot_sampling_client(self, name: str | None = None) -> Awaitable[SamplingClient]:
        """A client on the weights in training; it is to be used while no step is under way."""
        return self._client(adapter=True)

    async def open_sampling_client(
        self, model: str | None = None, weights: str | None = None
    ) -> SamplingClient:
        """A client on the base model, without its adapter. Raises UserError for anything else."""
        if weights is not None or model not in (None, self.spec.name):
            what = "the local backend samples from the model in training and its base only"
            raise UserError(Problem("backend.kind", what, "take embedded for other models"))
        return await self._client(adapter=False)

    async def _client(self, adapter: bool) -> SamplingClient:
        eos = self.tokenizer.eos_token_id
        return LiveSamplingClient(self.model, eos, self.longest, adapter)

    async def save_full_state(self, name: str) -> str:
        """Write weights and training state into the scratch folder; the run's store takes them."""
        await asyncio.to_thread(self._save, Path(self._scratch.name) / name)
        return f"local://{name}"

    def _save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(exist_ok=True)
        save_file(self.weights(), folder / ADAPTER_WEIGHTS)
        _write_config(self.model.peft_config[ADAPTER], folder, self.spec.name)
        if self.training_state is not None:
            write_state(folder, self.training_state())

    async def export_state(self, uri: str, folder: Path) -> bool:
        """Move a saved state's files out of the scratch folder."""
        source = Path(self._scratch.name) / uri.removeprefix("local://")
        await asyncio.to_thread(_move_files, source, folder)
        return True

    def discard_state(self, uri: str) -> None:
        """Nothing: saved states leave the scratch folder when they are exported."""

    async def aclose(self) -> None:
        """End what belongs to it and remove the scratch folder. Safe to call twice."""
        for end in self.at_close:
            await asyncio.to_thread(end)
        await asyncio.to_thread(self._scratch.cleanup)

    # -- what only a backend with steps of its own has -------------------------------------------

    def forward_backward_async(
        self,
        data: list[tinker.Datum],
        *,
        loss_fn: str,
        loss_fn_config: dict[str, float] | None = None,
    ) -> Awaitable[ForwardBackwardResult]:
        """Refused: TRL takes the steps here."""
        _no_steps()

    def forward_backward_custom_async(
        self, data: list[tinker.Datum], loss_fn: LossCallable
    ) -> Awaitable[ForwardBackwardResult]:
        """Refused: TRL takes the steps here."""
        _no_steps()

    def optim_step_async(self, adam: tinker_types.AdamParams) -> Awaitable[OptimStepResult]:
        """Refused: TRL takes the steps here."""
        _no_steps()

    def save_for_sampler(self, name: str) -> Awaitable[str]:
        """Refused: checkpoints are exported, and samplers take an adapter's folder."""
        _no_steps()


class LocalKind:
    """transformers and PEFT in this process; TRL trains (local_sft, local_dpo, local_rl)."""

    kind: ClassVar[str] = "local"
    Params: ClassVar[type[BackendParams]] = LocalParams

    @staticmethod
    def check(params: LocalParams, model: ModelSpec) -> list[Problem]:
        """That TRL is installed, the device is here, and no launcher starts the run several times.

        Only a device that is asked for by name imports torch.
        """
        problems = []
        if importlib.util.find_spec("trl") is None:
            what, remedy = (
                "local needs TRL, which is not installed",
                "pip install 'flowtune[local]'",
            )
            problems.append(Problem("backend.kind", what, remedy))
        elif params.device in ("cuda", "mps"):
            try:
                _device(params, rank=0)
            except UserError as error:
                problems.extend(error.problems)
        if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
            problems.append(
                Problem(
                    "backend.params.num_processes",
                    f"WORLD_SIZE is {size!r} in the environment, as where a launcher (torchrun, "
                    "accelerate launch) starts a run several times",
                    "start it once, by `flowtune run` without WORLD_SIZE, and say here how many "
                    "processes it may have",
                )
            )
        return problems

    @staticmethod
    async def open(params: LocalParams, model: ModelSpec, state: SavedState | None) -> Backend:
        """Load the model, give it its adapter, and bring both to the saved state."""
        return await asyncio.to_thread(open_local, params, model, state)


def quiet_torch() -> None:
    """To be called before torch is imported: what it would log of unused parameters is meant."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def open_local(
    params: LocalParams, spec: ModelSpec, state: SavedState | None, rank: int = 0
) -> LocalBackend:
    """Load the model, give it its adapter, and bring both to the saved state. Blocks.

    `rank` says which of the processes it is for. Raises UserError for a model or a device that
    will not do.
    """
    if problems := LocalKind.check(params, spec):
        raise UserError(*problems)
    quiet_torch()
    import torch

    device = _device(params, rank)
    if (threads := _threads(params, device)) is not None:
        torch.set_num_threads(threads)
    on_cuda = device.startswith("cuda")
    bfloat16 = params.dtype == "bfloat16" or (params.dtype == "auto" and on_cuda)
    model, tokenizer = _load(spec.name, torch.bfloat16 if bfloat16 else torch.float32)
    adapted = add_adapter(model.to(device), spec)
    backend = LocalBackend(adapted, tokenizer, spec, rank, params.num_processes)
    backend.fresh_weights()
    backend.take_state(state)
    return backend


def _device(params: LocalParams, rank: int) -> str:
    """Where a process computes. Raises UserError for a device that is not there."""
    import torch

    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    device: str = params.device
    if device == "auto":
        device = next(name for name, available in there.items() if available)
    if not there[device]:
        what = f"there is no {device} on this machine"
        raise UserError(Problem("backend.params.device", what, "take auto"))
    several = {"cuda": torch.cuda.device_count(), "mps": 1}.get(device, params.num_processes)
    if params.num_processes > several:
        what = f"there are {params.num_processes} processes, and {several} {device} device(s)"
        remedy = f"take {several} at most" + (", or device: cpu" if device == "mps" else "")
        raise UserError(Problem("backend.params.num_processes", what, remedy))
    return f"cuda:{rank}" if device == "cuda" else device


def _threads(params: LocalParams, device: str) -> int | None:
    """CPU threads of a process; None leaves torch's choice."""
    if params.threads is None and device == "cpu" and params.num_processes > 1:
        return max((os.cpu_count() or 1) // params.num_processes, 1)
    return params.threads


def _load(name: str, dtype: torch.dtype) -> tuple[Any, Tokenizer]:
    """The model and its tokenizer. Raises UserError for files that will not do."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    source = str(Path(name).expanduser())
    if not Path(source).is_dir() and not HUB_NAME.fullmatch(name):
        raise _unfit(f"there is no folder {name}")
    logging.disable_progress_bar()
    part = name
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        part = f"the tokenizer of {name}"
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, SafetensorError) as error:
        words = f"{part} cannot be loaded: {first_line(error)}"
        raise _unfit(words) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made without a file, of some kinds
        raise _unfit(f"{part} has no words")
    _without_router_loss(model.config.get_text_config())
    return model, tokenizer


def _unfit(what: str) -> UserError:
    remedy = "name a folder or a hub model that holds a causal language model and its tokenizer"
    return UserError(Problem("model.name", what, remedy))


def _without_router_loss(config: Any) -> None:
    """Of a mixture of experts: the loss is the algorithm's alone, unless TRL is told otherwise.

    TRL would add the load-balancing loss with the coefficient that it finds in the model's config;
    the routers that it is for get no adapter.
    """
    if hasattr(config, "router_aux_loss_coef"):
        config.router_aux_loss_coef = 0.0
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False


def _context(config: Any, tokenizer: Any) -> int:
    """How many tokens the model reads, by its config, else by its tokenizer."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        if isinstance(longest := getattr(text, name, None), int):
            return longest
    return min(int(tokenizer.model_max_length), sys.maxsize)  # 1e30 stands for no limit


def _read_adapter(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an adapter in PEFT's layout. Raises UserError for none that can be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / ADAPTER_WEIGHTS
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except FileNotFoundError as error:
        what = f"there is no {file}"
        remedy = "give the folder of a checkpoint, as a run's checkpoints/step-… is"
        raise UserError(Problem("model.init_from", what, remedy)) from error
    except SafetensorError as error:
        what = f"{file} cannot be read: {error}"
        raise UserError(Problem("model.init_from", what, "copy it anew")) from error
    return tensors


def _write_config(config: Any, folder: Path, base_model: str) -> None:
    """The adapter's config, the same file in every process."""
    kept = copy.copy(config)
    kept.base_model_name_or_path = base_model
    kept.inference_mode = True
    kept.target_modules = sorted(config.target_modules)  # a set has another order in each process
    kept.save_pretrained(str(folder))


def _move_files(source: Path, folder: Path) -> None:
    import shutil

    for file in source.iterdir():
        shutil.move(file, folder / file.name)
    source.rmdir()


def _no_steps() -> NoReturn:
    raise UserError(
        Problem(
            "backend.kind",
            "local trains with TRL only",
            "set algorithm.kind to local_sft, local_dpo or local_rl, or backend.kind to embedded",
        )
    )
