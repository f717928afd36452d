"""Architectures on the local backend: which layers are trained, what a checkpoint holds, sampling.

Tiny random models that transformers makes; PEFT and `generate` are the references.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tinker import types as tinker_types
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from algorithms.experiment import parse_experiment
from backends.base import ModelSpec, SavedState
from backends.errors import UserError
from backends.local import LocalBackend, LocalKind, LocalParams, open_local
from backends.local_layers import adapted_layers, add_adapter
from backends.local_sampling import LiveSamplingClient, _batches, _Row
from tests.algorithms.test_local import ARITHMETIC, document, rows_of, trained
from tests.algorithms.test_local import opened as started

TOKENIZER = Path("examples/models/tiny-qwen3")
PARAMS = LocalParams(device="cpu", threads=1)

COMMON = {"vocab_size": 512, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
QKVO = {"q_proj", "k_proj", "v_proj", "o_proj"}
QKV_OUT = {"q_proj", "k_proj", "v_proj", "out_proj"}
FUSED = {"query_key_value", "dense"}
FOUR = {"dense_h_to_4h", "dense_4h_to_h"}


@dataclass(frozen=True)
class Architecture:
    """A model's sizes, and the layers of its groups by name; None where a group cannot be had."""

    sizes: dict[str, Any]
    attention: set[str] | None
    mlp: set[str] | None
    longest: int = 128
    both: set[str] = field(default_factory=set)


ARCHITECTURES = {
    "gpt2": Architecture(
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
        {"c_attn", "c_proj"},
        {"c_fc", "c_proj"},
    ),
    "bloom": Architecture({"hidden_size": 32, "n_layer": 2, "n_head": 4}, FUSED, FOUR, 1024),
    "mpt": Architecture(
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        {"Wqkv", "out_proj"},
        {"up_proj", "down_proj"},
        64,
    ),
    "opt": Architecture(
        SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32},
        None,
        None,
        both=QKV_OUT | {"fc1", "fc2"},
    ),
    "gpt_neox": Architecture(SIZES, FUSED, FOUR),
    "phi": Architecture(SIZES, {"q_proj", "k_proj", "v_proj", "dense"}, {"fc1", "fc2"}),
    "mixtral": Architecture(SIZES | {"num_local_experts": 4}, QKVO, None),
    "qwen3_moe": Architecture(SIZES | EXPERTS | {"head_dim": 8}, QKVO, None),
    "gpt_oss": Architecture(
        SIZES | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, QKVO, None
    ),
    "deepseek_v3": Architecture(
        SIZES
        | LATENT
        | EXPERTS
        | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
        None,
    ),
    "qwen3_next": Architecture(
        SIZES
        | EXPERTS
        | {
            "head_dim": 8,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        QKVO | {"in_proj_qkvz", "in_proj_ba", "out_proj"},
        None,
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def made(models: Path, name: str, sizes: dict[str, Any]) -> str:
    """A model's folder; made when it is first asked for."""
    folder = models / name
    if not folder.is_dir():
        torch.manual_seed(0)
        kind = name.partition("-")[0]
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**COMMON, **sizes}))
        with torch.no_grad():  # larger than they come, so that greedy choices are far apart
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(5)
        model.float().save_pretrained(folder)
        for file in (*TOKENIZER.glob("*token*"), TOKENIZER / "chat_template.jinja"):
            shutil.copy(file, folder)
    return str(folder)


def opened(name: str, **spec: Any) -> LocalBackend:
    shape = {"lora_rank": 2, "train_unembed": False, **spec}
    return open_local(PARAMS, ModelSpec(name=name, **shape), None)


def adapted(backend: LocalBackend) -> set[str]:
    return {path.rpartition(".")[2] for path, _ in adapted_layers(backend.model)}


def spec_of(architecture: Architecture) -> dict[str, bool]:
    """The most that can be trained of it."""
    return {"train_mlp": architecture.mlp is not None or bool(architecture.both)}


@pytest.fixture(params=sorted(ARCHITECTURES))
def case(request: pytest.FixtureRequest, models: Path) -> tuple[str, Architecture]:
    row = ARCHITECTURES[request.param]
    return made(models, request.param, row.sizes), row


# --- which layers -------------------------------------------------------------------------------


def test_each_group_is_trained_whole_or_refused(case: tuple[str, Architecture]) -> None:
    name, row = case
    every = row.both or (row.attention or set()) | (row.mlp or set())
    for switches, wanted in (
        ({"train_mlp": False}, row.attention),
        ({"train_attn": False}, row.mlp),
        ({}, every if row.mlp or row.both else None),
    ):
        if wanted is None:
            with pytest.raises(UserError) as refusal:
                opened(name, **switches)
            (problem,) = refusal.value.problems
            assert problem.where.startswith("algorithm.params")
            assert "leave train_attn" in problem.remedy
        else:
            backend = opened(name, **switches)
            assert adapted(backend) == wanted
            assert backend.longest == row.longest


def test_of_one_name_in_two_groups_only_the_wanted_is_trained(models: Path) -> None:
    backend = opened(made(models, "gpt2", ARCHITECTURES["gpt2"].sizes), train_mlp=False)
    paths = [path.removeprefix("base_model.model.") for path, _ in adapted_layers(backend.model)]
    assert paths == [
        f"transformer.h.{i}.attn.{name}" for i in (0, 1) for name in ("c_attn", "c_proj")
    ]


def test_layers_that_peft_would_look_for_elsewhere_are_refused(models: Path) -> None:
    # Without a routed expert PEFT looks for stacked ones all the same: it knows the model's kind.
    sizes = ARCHITECTURES["deepseek_v3"].sizes | {"first_k_dense_replace": 2}
    name = made(models, "deepseek_v3-dense", sizes)
    with pytest.raises(UserError, match="down_proj") as refusal:
        opened(name)
    assert refusal.value.problems[0].where == "model.name"
    assert adapted(opened(name, train_mlp=False)) == ARCHITECTURES["deepseek_v3"].attention


def test_a_model_that_peft_does_not_know_to_adapt_is_refused_by_name(models: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    with pytest.raises(UserError, match="out_proj") as refusal:
        opened(made(models, "mamba", sizes))
    assert refusal.value.problems[0].where == "model.name"


def test_routers_have_no_loss_unless_trl_is_told(models: Path) -> None:
    name = made(models, "mixtral", ARCHITECTURES["mixtral"].sizes | {"output_router_logits": True})
    config = opened(name, train_mlp=False).model.config
    assert (config.router_aux_loss_coef, config.output_router_logits) == (0.0, False)


def test_only_the_generators_of_the_models_device_are_kept(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: pytest.fail("a GPU's generator"))
    name = made(models, "gpt2", ARCHITECTURES["gpt2"].sizes)
    model = AutoModelForCausalLM.from_pretrained(name)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapter(model, ModelSpec(name=name, lora_rank=2, train_unembed=False))
    assert torch.equal(torch.get_rng_state(), before)


# --- checkpoints --------------------------------------------------------------------------------


def test_peft_loads_every_tensor_of_a_checkpoint(
    case: tuple[str, Architecture], tmp_path: Path
) -> None:
    from peft import PeftModel, get_peft_model_state_dict

    name, row = case
    backend = opened(name, **spec_of(row))
    backend.set_weights({key: torch.randn_like(t) for key, t in backend.weights().items()})
    backend._save(tmp_path / "saved")
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(name), tmp_path / "saved"
    )
    written = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    back = get_peft_model_state_dict(loaded)
    assert written.keys() == back.keys()
    assert sum("lora_" in key for key, _ in loaded.named_parameters()) == len(written)
    assert all(torch.equal(tensor, back[key]) for key, tensor in written.items())
    tokens = torch.arange(2, 12)[None]
    ours, theirs = backend.model.eval()(tokens).logits, loaded.eval()(tokens).logits
    assert torch.equal(ours, theirs)


def test_a_checkpoints_config_says_what_is_loaded(models: Path, tmp_path: Path) -> None:
    backend = opened(made(models, "gpt2", ARCHITECTURES["gpt2"].sizes))
    backend._save(tmp_path / "saved")
    kept = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert kept["target_modules"] == ["c_attn", "c_fc", "c_proj"]
    assert (kept["fan_in_fan_out"], kept["inference_mode"], kept["r"]) == (True, True, 2)


def test_a_folder_without_a_whole_adapter_is_refused(tmp_path: Path) -> None:
    backend = opened(str(TOKENIZER))
    with pytest.raises(UserError, match="there is no") as refusal:
        backend.take_state(SavedState(None, tmp_path, optimizer=False))
    assert refusal.value.problems[0].where == "model.init_from"
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x09\0\0\0")
    with pytest.raises(UserError, match="cannot be read"):
        backend.load_weights(tmp_path)


# --- sampling -----------------------------------------------------------------------------------


async def test_samples_are_those_of_generate(case: tuple[str, Architecture]) -> None:
    name, row = case
    backend = opened(name, **spec_of(row))
    greedy = tinker_types.SamplingParams(max_tokens=6, temperature=0.0, stop=[1])
    client = LiveSamplingClient(backend.model, 1, backend.longest)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]
    waiting = [
        client.sample(tinker_types.ModelInput.from_ints(prompt), 1, greedy) for prompt in prompts
    ]
    for prompt, answer in zip(prompts, [await each for each in waiting], strict=True):
        reference = backend.model.eval().generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=1
        )
        assert list(answer.sequences[0].tokens) == reference[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["gpt2", "opt", "mpt"])
async def test_a_prompt_as_long_as_the_context_is_answered_beside_short_ones(
    name: str, models: Path
) -> None:
    # The first two have a table of positions, the last biases for so many places.
    row = ARCHITECTURES[name]
    backend = opened(made(models, name, row.sizes), **spec_of(row))
    client = LiveSamplingClient(backend.model, None, backend.longest)
    greedy = tinker_types.SamplingParams(max_tokens=6, temperature=0.0)
    prompts = [list(range(2, row.longest + 1)), [8, 9, 10]]
    requests = [tinker_types.ModelInput.from_ints(prompt) for prompt in prompts]
    together = [client.sample(prompt, 1, greedy) for prompt in requests]
    found = [list((await answer).sequences[0].tokens) for answer in together]
    alone = [list((await client.sample(each, 1, greedy)).sequences[0].tokens) for each in requests]
    assert found == alone
    assert [len(tokens) for tokens in found] == [1, 6]


def test_rows_that_fit_side_by_side_are_decoded_together() -> None:
    params = tinker_types.SamplingParams()
    sizes = [(60, 4), (5, 8), (57, 7), (4, 8), (62, 2)]
    rows = [_Row([2] * prompt, most, params, frozenset(), None, [], []) for prompt, most in sizes]  # type: ignore[arg-type]
    taken = [[len(row.prompt) for row in batch] for batch in _batches(rows, 64)]
    assert taken == [[4, 5], [57], [60], [62]]
    assert [len(batch) for batch in _batches(rows[1:2] * 130, 64)] == [64, 64, 2]


async def test_routers_that_have_a_loss_have_it_again_behind_a_sample(models: Path) -> None:
    backend = opened(made(models, "mixtral", ARCHITECTURES["mixtral"].sizes), train_mlp=False)
    backend.model.config.output_router_logits = True
    client = LiveSamplingClient(backend.model, 1, backend.longest)
    greedy = tinker_types.SamplingParams(max_tokens=3, temperature=0.0)
    answer = await client.sample(tinker_types.ModelInput.from_ints([5, 6, 7]), 2, greedy)
    assert len(answer.sequences) == 2
    assert backend.model.config.output_router_logits is True


async def test_a_model_without_keys_and_values_is_refused_where_it_would_sample(
    models: Path,
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 128}
    backend = opened(made(models, "rwkv", sizes))
    client = await backend.snapshot_sampling_client()
    with pytest.raises(UserError, match="rwkv models keep no keys and values"):
        await client.sample(
            tinker_types.ModelInput.from_ints([5]), 1, tinker_types.SamplingParams(max_tokens=2)
        )


# --- runs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "trainer"),
    [
        ("gpt2", "local_sft", {}),
        ("bloom", "local_sft", {}),
        ("opt", "local_sft", {}),
        ("mixtral", "local_sft", {}),
        ("mixtral", "local_sft", {"router_aux_loss_coef": 0.1}),
        ("mixtral", "local_dpo", {}),
    ],
)
async def test_a_run_of_an_architecture_evaluates_and_ends(
    name: str, kind: str, trainer: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    row = ARCHITECTURES[name]
    params: dict[str, Any] = {**spec_of(row), "max_steps": 2, "save_every": None}
    if trainer:
        params |= {"trainer": trainer, "reduction": "mean"}
    written = document(kind, tmp_path, **params)
    written["model"]["name"] = made(models, name, row.sizes)
    held_out = {"kind": "jsonl", "path": str(ARITHMETIC / "test.jsonl")}
    written["evaluations"] = [
        {"name": "right", "data": held_out, "limit": 3, "max_tokens": 3, "every": 1},
        {"name": "likely", "kind": "nll", "data": held_out, "limit": 3, "every": 1},
    ]
    run = await trained(await started(parse_experiment(written)))
    first, _ = rows_of(run)
    found = [(row["step"], row["name"]) for row in run.store.evaluations()]
    assert sorted(found) == [(step, each) for step in (0, 1, 2) for each in ("likely", "right")]
    nll = [row["score"] for row in run.store.evaluations() if row["name"] == "likely"]
    if kind == "local_sft":
        assert nll == sorted(nll, reverse=True)
    if kind == "local_dpo":  # nothing of the routers is in it
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert ("trl/aux_loss" in first) == bool(trainer)
    assert ("train_mean_nll" in first) == (kind == "local_sft" and not trainer)


# --- files that will not do ---------------------------------------------------------------------


def test_a_models_files_are_refused_by_name(models: Path, tmp_path: Path) -> None:
    whole = Path(made(models, "phi", ARCHITECTURES["phi"].sizes))
    broken = shutil.copytree(whole, tmp_path / "broken")
    content = (whole / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(content[:1000])
    silent = shutil.copytree(whole, tmp_path / "silent", ignore=shutil.ignore_patterns("*token*"))
    other = Path(made(models, "mixtral", ARCHITECTURES["mixtral"].sizes))
    speechless = shutil.copytree(
        other, tmp_path / "other", ignore=shutil.ignore_patterns("*token*")
    )
    for name, why in (
        (str(tmp_path / "nowhere"), "there is no folder"),
        (str(broken), "broken cannot be loaded"),
        (str(silent), "the tokenizer of .* has no words"),
        (str(speechless), "the tokenizer of .* cannot be loaded"),
    ):
        with pytest.raises(UserError, match=why) as refusal:
            opened(name)
        assert refusal.value.problems[0].where == "model.name"


@pytest.mark.parametrize("error", [OSError(""), ValueError("\n "), OSError("\nno\nmore")])
def test_an_error_without_words_is_told_by_its_kind(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    said = str(error).strip()[:2] or type(error).__name__
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    with pytest.raises(UserError, match=f"cannot be loaded: {said}\n"):
        opened(str(TOKENIZER))


@pytest.mark.parametrize("size", ["", "two", "2"])
def test_a_world_size_that_is_not_one_is_told_before_the_run(
    size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    (problem,) = LocalKind.check(PARAMS, ModelSpec(name=str(TOKENIZER)))
    assert problem.where == "backend.params.num_processes"
    assert f"WORLD_SIZE is {size!r}" in problem.what
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert LocalKind.check(PARAMS, ModelSpec(name=str(TOKENIZER))) == []


def test_processes_that_one_mps_device_cannot_share_may_have_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    params = LocalParams(num_processes=2)
    with pytest.raises(UserError, match="take 1 at most, or device: cpu"):
        open_local(params, ModelSpec(name=str(TOKENIZER)), None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_here_is_told_before_the_run() -> None:
    (problem,) = LocalKind.check(LocalParams(device="cuda"), ModelSpec(name=str(TOKENIZER)))
    assert (problem.where, problem.remedy) == ("backend.params.device", "take auto")
    assert LocalKind.check(PARAMS, ModelSpec(name=str(TOKENIZER))) == []
