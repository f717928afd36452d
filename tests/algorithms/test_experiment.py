"""The document: reading, round trip, schema, overrides, and every error's words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from pydantic import ValidationError

from algorithms.document import explain, read_document, with_overrides
from algorithms.experiment import Experiment, load_experiment, parse_experiment
from algorithms.sft import SFTConfig
from backends.errors import Problem, UserError
from tests.algorithms.samples import document, experiment

ROOT = Path(__file__).parents[2]
EVALUATION = {"name": "heldout", "data": {"kind": "rows", "rows": [{"prompt": "a"}]}, "every": 5}


def problems_of(**changes: Any) -> dict[str, Problem]:
    with pytest.raises(ValidationError) as caught:
        Experiment.model_validate(document(**changes))
    return {problem.where: problem for problem in explain(caught.value, Experiment)}


def sft(**params: Any) -> dict[str, Any]:
    return {"kind": "sft", "params": params}


# --- what it says -------------------------------------------------------------------------------


def test_defaults() -> None:
    spec = experiment(algorithm={"kind": "sft"})
    assert spec.algorithm.params == SFTConfig()
    assert (spec.seed, spec.store, spec.backend.kind) == (0, "runs", "embedded")
    assert spec.orchestration.task_runs == "auto"
    assert (spec.evaluations, spec.callbacks, spec.tags) == ([], [], [])


def test_the_algorithm_decides_the_default_backend() -> None:
    assert experiment().backend.kind == "mock"
    assert experiment(backend={"kind": "tinker"}).backend.kind == "tinker"


def test_an_evaluation_scores_by_exact_match_unless_told_otherwise() -> None:
    (evaluation,) = experiment(evaluations=[EVALUATION]).evaluations
    assert evaluation.verifier.kind == "exact_match"
    assert (evaluation.before, evaluation.temperature, evaluation.limit) == (True, 0.0, None)


def test_round_trip() -> None:
    spec = experiment(
        algorithm=sft(learning_rate=1e-3, schedule={"kind": "cosine"}, save_at_fractions=[0.5]),
        evaluations=[EVALUATION],
        tags=["a"],
    )
    dumped = json.loads(json.dumps(spec.model_dump(mode="json")))
    assert dumped["algorithm"]["params"]["schedule"]["kind"] == "cosine"
    assert dumped["evaluations"][0]["data"]["rows"] == [{"prompt": "a"}]
    again = parse_experiment(dumped)
    assert again == spec
    assert again.model_dump(mode="json") == dumped


def test_the_model_spec_follows_the_algorithm() -> None:
    spec = experiment(seed=4, algorithm=sft(lora_rank=7, train_mlp=False)).model_spec()
    assert (spec.name, spec.lora_rank, spec.seed) == ("mock", 7, 4)
    assert (spec.train_attn, spec.train_mlp, spec.train_unembed) == (True, False, True)


def test_the_shipped_experiment_loads() -> None:
    spec = load_experiment(ROOT / "examples" / "sft_arithmetic.yaml", ["backend.kind=mock"])
    assert spec.name == "sft-arithmetic"
    assert spec.algorithm.params.learning_rate == 2e-3


# --- its schema ---------------------------------------------------------------------------------


def test_the_schema_stands_alone_and_takes_what_the_model_takes() -> None:
    schema = Experiment.model_json_schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    assert list(validator.iter_errors(document(evaluations=[EVALUATION]))) == []
    assert list(validator.iter_errors(experiment().model_dump(mode="json"))) == []
    assert list(validator.iter_errors(document(algorithm=sft(learning_rate=-1))))
    assert list(validator.iter_errors(document(backend={"kind": "moock"})))


def test_the_schema_is_a_form() -> None:
    schema = Experiment.model_json_schema()
    assert schema["required"] == ["name", "model", "data", "algorithm"]
    for name, field in schema["properties"].items():
        assert "$ref" in field or field["description"], name
    kinds = schema["properties"]["algorithm"]["discriminator"]["mapping"]
    assert {"sft", "mock_sft"} <= set(kinds)
    section = schema["$defs"][kinds["sft"].rpartition("/")[2]]
    assert section["title"] == "sft"
    params = schema["$defs"][section["properties"]["params"]["$ref"].rpartition("/")[2]]
    assert params["properties"]["learning_rate"]["default"] == 1e-4
    assert params["properties"]["supervise"]["enum"] == ["all_assistant", "last_assistant"]


# --- what it refuses ----------------------------------------------------------------------------


def test_an_unknown_field_names_the_nearest() -> None:
    problem = problems_of(algorithm=sft(lerning_rate=1.0))["algorithm.params.lerning_rate"]
    assert problem.what == "unknown field"
    assert problem.remedy.startswith("did you mean 'learning_rate'?")
    problem = problems_of(evaluation=[])["evaluation"]
    assert "did you mean 'evaluations'?" in problem.remedy


def test_an_unknown_kind_lists_those_there_are() -> None:
    problem = problems_of(algorithm={"kind": "stf"})["algorithm.kind"]
    assert problem.what == "there is no algorithm 'stf'"
    assert "did you mean 'sft'?" in problem.remedy
    assert "mock_sft" in problem.remedy
    problem = problems_of(backend={"kind": "gpu"})["backend.kind"]
    assert "the backends are" in problem.remedy
    assert "mock" in problem.remedy
    found = problems_of(evaluations=[EVALUATION | {"verifier": {"kind": "exact"}}])
    assert "exact_match" in found["evaluations[0].verifier.kind"].remedy


def test_a_section_without_a_kind() -> None:
    problem = problems_of(algorithm={"params": {}})["algorithm.kind"]
    assert problem.what == "is missing"
    assert "sft" in problem.remedy


def test_a_section_that_is_none() -> None:
    assert problems_of(algorithm="sft")["algorithm"].what == "'sft' is not a section"
    assert problems_of(model="Qwen")["model"].what == "'Qwen' is not a section"


def test_bad_values_are_shown_with_what_is_expected() -> None:
    found = problems_of(
        seed="x",
        algorithm=sft(learning_rate=-1, supervise="all", batch_size=0),
        evaluations=[EVALUATION | {"every": 0}],
        orchestration={"task_runs": "segments"},
    )
    assert found["seed"].what.startswith("'x' should be a valid integer")
    assert found["algorithm.params.learning_rate"].what == "-1 should be greater than 0"
    assert found["algorithm.params.batch_size"].what.startswith("0 should be greater than or equal")
    assert found["algorithm.params.supervise"].what == "'all' is not known"
    assert "all_assistant, last_assistant" in found["algorithm.params.supervise"].remedy
    assert "0 should be" in found["evaluations[0].every"].what
    assert "did you mean 'segment'?" in found["orchestration.task_runs"].remedy


def test_alternatives_of_one_field_are_one_problem() -> None:
    found = problems_of(data={"kind": "jsonl", "path": 3})
    assert list(found) == ["data.path"]
    assert "string" in found["data.path"].what
    assert "list" in found["data.path"].what


def test_missing_fields_say_what_they_are() -> None:
    with pytest.raises(UserError) as caught:
        parse_experiment({})
    found = {problem.where: problem for problem in caught.value.problems}
    assert list(found) == ["name", "model", "data", "algorithm"]
    assert found["model"].what == "is missing"
    assert "Which model is trained." in found["model"].remedy


def test_impossible_combinations() -> None:
    both = problems_of(algorithm=sft(save_every=2, save_at_fractions=[0.5]))
    assert "not both" in both["algorithm.params"].what
    twice = problems_of(evaluations=[EVALUATION, EVALUATION])
    assert "two evaluations are called 'heldout'" in twice["evaluations"].what
    named = problems_of(name="my run/1")
    assert "for example 'my-run-1'" in named["name"].what


def test_an_unknown_callback_is_refused_with_the_known_ones() -> None:
    problem = problems_of(callbacks=[{"kind": "wand"}])["callbacks[0].kind"]
    assert "there is no callback 'wand'" in problem.what
    assert "wandb" in problem.remedy
    wrong = problems_of(callbacks=[{"kind": "csv", "on_error": "shrug"}])
    assert list(wrong) == ["callbacks[0].on_error"]


def test_no_word_of_pydantic() -> None:
    found = problems_of(algorithm=sft(x=1), backend={"kind": "?"}, seed=[], data=None, name=3)
    text = "\n".join(map(str, found.values())).lower()
    assert len(found) == 5
    for word in ("pydantic", "input should", "tag", "union", "dict", "http"):
        assert word not in text


# --- files and overrides ------------------------------------------------------------------------


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sft.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("name: a\nmodel: {name: x\n", ":3", "not YAML: expected ',' or '}'"),
        ("name: a\n\tseed: 1\n", ":2", "not YAML"),
        ("name: a\nseed: 1\nname: b\n", ":3", "the key 'name' stands here twice"),
        ("", "", "holds no experiment"),
        ("- a\n", "", "holds a list"),
        ("!!python/object:os.system {}\n", ":1", "not YAML: could not determine a constructor"),
    ],
)
def test_bad_yaml_is_named_with_its_line(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_document(path)
    (problem,) = caught.value.problems
    assert problem.where == f"{path}{where}"
    assert what in problem.what
    assert problem.remedy


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\n")
    with pytest.raises(UserError, match="did you mean") as caught:
        read_document(tmp_path / "stf.yaml")
    assert str(path) in caught.value.problems[0].remedy


def test_overrides_are_yaml_and_make_what_is_missing() -> None:
    changed = with_overrides(
        document(evaluations=[EVALUATION]),
        [
            "algorithm.params.learning_rate=1e-3",
            "algorithm.params.schedule.kind=cosine",
            "evaluations[0].every=null",
            "evaluations.0.limit=3",
            "tags=[a, b]",
            "store=s3://bucket/a=b",
        ],
    )
    spec = parse_experiment(changed)
    assert spec.algorithm.params.learning_rate == 1e-3
    assert spec.algorithm.params.schedule.kind == "cosine"
    assert (spec.evaluations[0].every, spec.evaluations[0].limit) == (None, 3)
    assert spec.tags == ["a", "b"]
    assert spec.store == "s3://bucket/a=b"


def test_overrides_leave_the_document_alone() -> None:
    original = document()
    before = json.dumps(original)
    with_overrides(original, ["algorithm.params.batch_size=9"])
    assert json.dumps(original) == before


@pytest.mark.parametrize(
    ("override", "what", "remedy"),
    [
        ("seed", "not an assignment", "--set section.field=value"),
        ("name.x=1", "name is 'small', which has no fields", "path"),
        ("evaluations.3.every=1", "evaluations has no item 3", "from 0 to 0"),
        ("seed=[", "is not YAML", "quote"),
    ],
)
def test_bad_overrides(override: str, what: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        with_overrides(document(evaluations=[EVALUATION]), [override])
    (problem,) = caught.value.problems
    assert problem.where == f"--set {override}"
    assert what in problem.what
    assert remedy in problem.remedy


def test_an_override_of_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        parse_experiment(with_overrides(document(), ["algorithm.parms.max_steps=3"]))
    (problem,) = caught.value.problems
    assert problem.where == "algorithm.parms"
    assert "did you mean 'params'?" in problem.remedy


# --- what it imports ----------------------------------------------------------------------------


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, algorithms.check, algorithms.experiment\n"
        "heavy = {'torch', 'transformers', 'tinker', 'datasets', 'prefect', 'peft', 's3fs'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
