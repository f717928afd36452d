"""Rollouts: the tokens are those that were sampled, turns merge, failures are tried again."""

from __future__ import annotations

import asyncio
import math
from typing import Any, ClassVar

import numpy as np
import pytest

from algorithms.data.shapes import Message
from algorithms.rollouts.chat import ChatClient
from algorithms.rollouts.environment import Environment, Step
from algorithms.rollouts.examples import anchored, kl_penalised, scored
from algorithms.rollouts.guess_number import GuessNumber
from algorithms.rollouts.metrics import rollout_metrics
from algorithms.rollouts.runner import Places, seed_of
from algorithms.rollouts.scenes import AgentStage, EnvironmentStage, dressed
from algorithms.rollouts.shared import Shared
from algorithms.rollouts.single_turn import SingleTurn
from algorithms.rollouts.trajectory import Rollout, Turn, segments, to_datum
from backends.errors import StateLostError, UserError
from backends.tokenizer import load_tokenizer
from tests.algorithms.rollout_parts import Scripted, chat, placed, runner, section
from tests.algorithms.samples import MODEL, THINKING, byte_tokenizer

ASK: Message = {"role": "user", "content": "Say."}
AGAIN: Message = {"role": "user", "content": "Again."}
END = "<|im_end|>"


class Twice(Environment):
    """Asks twice; the reward is the length of what was said, in all."""

    async def start(self) -> list[Message]:
        return [{"role": "user", "content": self.row["ask"]}]

    async def step(self, message: Message) -> Step:
        self.turn = getattr(self, "turn", 0) + 1
        reward = float(len(message["content"]))
        return Step([AGAIN], reward, done=self.turn == 2, metrics={"turns": 1.0})


def says(*answers: str) -> Any:
    """A sampler's script: the answer of each turn, by how often the assistant has spoken."""
    return lambda prompt, index: answers[prompt.count("<|im_start|>assistant") - 1] + END


# --- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), load_tokenizer(str(MODEL))])
async def test_turns_that_extend_each_other_are_one_datum(tokenizer: Any) -> None:
    client = Scripted(tokenizer, says("12", "345"))
    talk = chat(client)
    first = await talk.reply([ASK])
    second = await talk.reply([ASK, first, AGAIN])
    assert (first["content"], second["content"]) == ("12", "345")
    (whole,) = segments(talk.turns)
    rendered = tokenizer.apply_chat_template(
        [[ASK, first, AGAIN, second]], tokenize=False, add_generation_prompt=False
    )[0]
    # All but the line break that the template writes behind the last turn.
    assert tokenizer.decode(whole.tokens.tolist()) + "\n" == rendered
    assert tokenizer.decode(whole.tokens[whole.mask].tolist()) == f"12{END}345{END}"


async def test_sampled_tokens_are_kept_as_they_were_drawn() -> None:
    """The same text has other tokens when it is tokenised again."""
    tokenizer = byte_tokenizer(merges=(("1", "2"),))
    client = Scripted(tokenizer, says("ignored", "3"))
    talk = chat(client)
    apart = [*(tokenizer.convert_tokens_to_ids(piece) for piece in "12"), tokenizer.eos_token_id]
    drawn = client._sequence
    client._sequence = lambda prompt, index, params: (  # type: ignore[method-assign]
        type(drawn(prompt, index, params))(
            stop_reason="stop",
            sequence_id="0",
            tokens_np=np.asarray(apart),
            logprobs_np=np.full(3, -1.0, np.float32),
        )
    )
    first = await talk.reply([ASK])
    assert first["content"] == "12"
    await talk.reply([ASK, first, AGAIN])
    (whole,) = segments(talk.turns)
    start = len(talk.turns[0].prompt)
    assert whole.tokens[start : start + 3].tolist() == apart
    assert tokenizer(["12"])["input_ids"][0] != apart[:2]


async def test_a_template_that_rewrites_earlier_turns_gives_a_datum_for_each() -> None:
    client = Scripted(byte_tokenizer(THINKING), says("<think>\n\n</think>\n\n12", "345"))
    # Qwen3 drops the thinking of earlier turns: what was sampled is not what is read later.
    talk = chat(client)
    await talk.reply([ASK])
    await talk.reply([ASK, {"role": "assistant", "content": "12"}, AGAIN])
    first, second = segments(talk.turns)
    decode = client.tokenizer.decode
    assert decode(first.tokens[first.mask].tolist()) == f"<think>\n\n</think>\n\n12{END}"
    assert decode(second.tokens[second.mask].tolist()) == f"345{END}"
    assert "think" not in decode(second.tokens.tolist())


async def test_an_answer_that_ended_otherwise_than_the_template_ends_it_is_not_merged() -> None:
    tokenizer = byte_tokenizer(eos="<|eos|>", specials=("<|im_start|>", END))
    client = Scripted(tokenizer, lambda prompt, index: "1<|eos|>")
    talk = chat(client)
    first = await talk.reply([ASK])
    await talk.reply([ASK, first, AGAIN])
    assert [turn.tokens for turn in talk.turns] == [talk.turns[0].tokens] * 2
    assert len(segments(talk.turns)) == 2
    assert "eos" not in tokenizer.decode(talk.turns[1].prompt)


def test_a_datum_by_hand() -> None:
    turns = [
        Turn([1, 2], [3, 4], [-0.5, -1.0], cut=False),
        Turn([1, 2, 3, 4, 5], [6], [-2.0], cut=False),
    ]
    (segment,) = segments(turns)
    assert segment.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert segment.mask.tolist() == [False, False, True, True, False, True]
    datum = to_datum(segment, np.where(segment.mask, 0.25, 0.0))
    assert datum.model_input.to_ints() == [1, 2, 3, 4, 5]
    inputs = {name: value.to_numpy().tolist() for name, value in datum.loss_fn_inputs.items()}
    assert inputs == {
        "target_tokens": [2, 3, 4, 5, 6],
        "logprobs": [0.0, -0.5, -1.0, 0.0, -2.0],
        "advantages": [0.0, 0.25, 0.25, 0.0, 0.25],
    }


@pytest.mark.parametrize(
    ("logprob", "what"),
    [(None, "gave 0 logprobs for 3 sampled tokens"), (math.nan, "gave nan as the logprob")],
)
async def test_a_missing_logprob_is_an_error_that_names_the_rollout(
    logprob: float | None, what: str
) -> None:
    client = Scripted(byte_tokenizer(), says("12"), logprob)
    with pytest.raises(UserError, match=rf"{what}.*row rows:1, sample 1, turn 1"):
        await runner(SingleTurn, max_retries=3).run(client, 0, placed([{"messages": [ASK]}]))
    assert len(client.requests) == 1


# --- the runner ---------------------------------------------------------------------------------


async def test_a_group_opens_with_one_request_and_goes_on_rollout_by_rollout() -> None:
    client = Scripted(byte_tokenizer(), says("12", "345"))
    groups = await runner(Twice, num_samples=3).run(client, 0, placed([{"ask": "a"}, {"ask": "b"}]))
    assert [len(group) for group in groups] == [3, 3]
    assert [count for _, count, _ in client.requests] == [3, 3, 1, 1, 1, 1, 1, 1]
    rollout = groups[0][0]
    assert (rollout.reward, rollout.end, rollout.metrics) == (5.0, "stop", {"turns": 2.0})
    assert [m["content"] for m in rollout.messages] == ["a", "12", "Again.", "345", "Again."]
    seeds = [params.seed for _, _, params in client.requests]
    assert len(set(seeds)) == len(seeds)


async def test_openings_that_differ_are_asked_for_each_by_itself() -> None:
    class Drawn(SingleTurn):
        async def start(self) -> list[Message]:
            return [{"role": "user", "content": f"{self.seed % 2}"}]

    client = Scripted(byte_tokenizer(), says("1"))
    (group,) = await runner(Drawn, num_samples=16).run(client, 0, placed([{}]))
    asked = {rollout.messages[0]["content"] for rollout in group}
    assert asked == {"0", "1"}
    assert len(client.requests) == 2
    assert sum(count for _, count, _ in client.requests) == 16


async def test_the_seed_decides_all_requests() -> None:
    async def asked(batch: int) -> list[tuple[str, int, int | None]]:
        client = Scripted(byte_tokenizer(), says("12", "345"))
        await runner(Twice).run(client, batch, placed([{"ask": "a"}]))
        return [(text, count, params.seed) for text, count, params in client.requests]

    first = await asked(3)
    assert await asked(3) == first
    assert [seed for *_, seed in await asked(4)] != [seed for *_, seed in first]
    # Written down: another seed would break every replay of a run that is under way.
    assert [seed for *_, seed in first] == [
        seed_of(7, 3, 0, 0, 1),
        *(seed_of(7, 3, 0, sample, 2) for sample in range(2)),
    ]
    assert seed_of(7, 3, 0, 0, 1) == 2043779851


async def test_no_more_run_at_once_than_may() -> None:
    running, most = 0, 0

    class Slow(SingleTurn):
        async def start(self) -> list[Message]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            return [ASK]

        async def step(self, message: Message) -> Step:
            nonlocal running
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            return Step(done=True)

    client = Scripted(byte_tokenizer(), says("1"))
    groups = await runner(Slow, num_samples=5, n_concurrent=3).run(client, 0, placed([{}] * 4))
    assert most == 3
    assert [len(group) for group in groups] == [5] * 4


async def test_places_that_were_not_all_got_are_given_back() -> None:
    places = Places(2)
    async with places.taken(1):
        waiting = asyncio.create_task(_hold(places, 2))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(1), places.taken(2):
        pass


async def _hold(places: Places, count: int) -> None:
    async with places.taken(count):
        pass


# --- how rollouts end ---------------------------------------------------------------------------


async def test_a_turn_that_is_cut_off_ends_the_rollout() -> None:
    client = Scripted(byte_tokenizer(), says("123456"))
    (group,) = await runner(Twice, max_tokens=3).run(client, 0, placed([{"ask": "a"}]))
    assert [(one.end, one.reward, len(one.turns)) for one in group] == [("length", 3.0, 1)] * 2


async def test_max_turns_end_a_rollout_that_is_not_done() -> None:
    client = Scripted(byte_tokenizer(), says("12"))
    (group,) = await runner(Twice, max_turns=1).run(client, 0, placed([{"ask": "a"}]))
    assert [(one.end, one.reward) for one in group] == [("max_turns", 2.0)] * 2


async def test_a_conversation_that_outgrows_the_context_ends_before_it_does() -> None:
    client = Scripted(byte_tokenizer(), says("12", "345"))
    # 20 + 3 tokens are the first turn, "Again." with its frame 26 more, and 8 may follow.
    for room, end in [(20 + 3 + 26 + 8, "stop"), (20 + 3 + 26 + 7, "max_context")]:
        rolling = runner(Twice, max_tokens=8, max_context=room)
        (group,) = await rolling.run(client, 0, placed([{"ask": "a"}]))
        assert {one.end for one in group} == {end}


async def test_plain_text_is_gone_on_from_without_a_template() -> None:
    client = Scripted(byte_tokenizer(), lambda prompt, index: "2" + END)
    (group,) = await runner(SingleTurn).run(client, 0, placed([{"prompt": "1+1="}]))
    assert client.requests[0][0] == "1+1="
    assert [m["content"] for m in group[0].messages] == ["1+1=", "2"]


# --- what goes wrong ----------------------------------------------------------------------------


class Shaky(Twice):
    """Fails in its second turn as often as `failures` says."""

    failures: ClassVar[int] = 0

    async def step(self, message: Message) -> Step:
        done = await super().step(message)
        if self.turn == 2 and Shaky.failures:
            Shaky.failures -= 1
            raise ZeroDivisionError("out of luck")
        return done


async def test_a_rollout_that_fails_is_tried_again_with_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tokens(group: list[Rollout]) -> list[Any]:
        return [[(turn.prompt, turn.tokens) for turn in rollout.turns] for rollout in group]

    rows = placed([{"ask": "a"}])
    client = Scripted(byte_tokenizer(), says("12", "345"))
    (smooth,) = await runner(Shaky, max_retries=2).run(client, 0, rows)
    monkeypatch.setattr(Shaky, "failures", 2)
    again = Scripted(byte_tokenizer(), says("12", "345"))
    (shaken,) = await runner(Shaky, max_retries=2).run(again, 0, rows)
    assert sum(rollout.retries for rollout in shaken) == 2
    assert [rollout.reward for rollout in shaken] == [5.0, 5.0]
    assert tokens(shaken) == tokens(smooth)
    assert {p.seed for *_, p in again.requests} == {p.seed for *_, p in client.requests}


async def test_an_environment_that_keeps_failing_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Shaky, "failures", 100)
    client = Scripted(byte_tokenizer(), says("12", "345"))
    with pytest.raises(UserError) as caught:
        await runner(Shaky, max_retries=1).run(client, 0, placed([{"ask": "a"}]))
    (problem,) = caught.value.problems
    assert problem.where == "algorithm.params.environment"
    assert problem.what.startswith("Shaky raised ZeroDivisionError: out of luck (row rows:1, ")
    assert "turn 2; tried 2 times" in problem.what


async def test_a_verifier_that_raises_is_never_a_reward() -> None:
    calls = 0

    async def broken(answer: str) -> float:
        nonlocal calls
        calls += 1
        raise ValueError("no idea")

    client = Scripted(byte_tokenizer(), says("12"))
    rolling = runner(SingleTurn, score=lambda row, place: broken, max_retries=2, num_samples=2)
    with pytest.raises(UserError, match=r"no idea \(row rows:1, sample \d, turn 1; tried 3 times"):
        await rolling.run(client, 0, placed([{"messages": [ASK]}]))
    assert calls >= 3


async def test_a_reward_is_a_finite_number() -> None:
    async def unsure(answer: str) -> float:
        return math.nan

    client = Scripted(byte_tokenizer(), says("12"))
    rolling = runner(SingleTurn, score=lambda row, place: unsure)
    with pytest.raises(UserError, match="the reward is nan, not a finite number"):
        await rolling.run(client, 0, placed([{"messages": [ASK]}]))


async def test_a_rollout_that_takes_too_long_is_an_error() -> None:
    class Stuck(SingleTurn):
        async def step(self, message: Message) -> Step:
            await asyncio.Event().wait()
            raise AssertionError

    client = Scripted(byte_tokenizer(), says("12"))
    with pytest.raises(UserError) as caught:
        await runner(Stuck, timeout_seconds=0.01).run(client, 0, placed([{"messages": [ASK]}]))
    assert caught.value.problems[0].where == "algorithm.params.rollout_timeout_seconds"
    assert "row rows:1" in caught.value.problems[0].what


async def test_a_lost_engine_is_not_the_environments_fault() -> None:
    def say(prompt: str, index: int) -> Any:
        return "12" + END if prompt.count("assistant") == 1 else StateLostError("gone")

    client = Scripted(byte_tokenizer(), say)
    with pytest.raises(StateLostError, match="gone"):
        await runner(Twice, max_retries=5).run(client, 0, placed([{"ask": "a"}]))
    assert len([1 for _, count, _ in client.requests if count == 1]) <= 2


# --- what is shared -----------------------------------------------------------------------------


async def test_a_shared_result_is_worked_out_once() -> None:
    shared: Shared[int] = Shared(2)
    calls = 0

    async def work() -> int:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)
        return 5

    assert await asyncio.gather(shared.get(0, work), shared.get(0, work)) == [5, 5]
    assert await shared.get(0, work) == 5
    assert calls == 1


async def test_shared_work_ends_with_the_last_who_waits_and_begins_anew() -> None:
    shared: Shared[int] = Shared(2)
    ended = asyncio.Event()

    async def never() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1

    async def at_once() -> int:
        return 2

    first, second = (asyncio.create_task(shared.get(0, never)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    assert not ended.is_set()
    second.cancel()
    async with asyncio.timeout(1):
        await ended.wait()
        await asyncio.gather(first, second, return_exceptions=True)
    assert await shared.get(0, at_once) == 2


# --- agents -------------------------------------------------------------------------------------


async def polite(chat: ChatClient, row: dict[str, Any]) -> float:
    """Asks twice, and pays for thanks."""
    first = await chat.reply([{"role": "user", "content": row["ask"]}])
    second = await chat.reply([{"role": "user", "content": row["ask"]}, first, AGAIN])
    return 2.0 * ("thanks" in second["content"])


async def scored_agent(chat: ChatClient, row: dict[str, Any]) -> None:
    """Leaves the reward to the verifier."""
    await chat.reply([ASK])


async def endless(chat: ChatClient, row: dict[str, Any]) -> float:
    """Never has enough."""
    messages: list[Message] = [ASK]
    while True:
        messages = [*messages, await chat.reply(messages), AGAIN]


async def silent(chat: ChatClient, row: dict[str, Any]) -> float:
    """Never asks."""
    return 1.0


def led_by(agent: Any) -> AgentStage:
    return AgentStage(f"{__name__}:{agent.__name__}")


async def test_an_agent_leads_the_rollout_and_all_its_turns_are_trained_on() -> None:
    client = Scripted(byte_tokenizer(), says("ok", "thanks"))
    (group,) = await runner(led_by(polite)).run(client, 0, placed([{"ask": "a"}]))
    assert [(one.reward, one.end, len(one.turns)) for one in group] == [(2.0, "stop", 2)] * 2
    assert len(segments(group[0].turns)) == 1
    assert group[0].messages[-1]["content"] == "thanks"


async def test_an_agent_may_leave_the_reward_to_the_verifier() -> None:
    client = Scripted(byte_tokenizer(), says("12345"))
    (group,) = await runner(led_by(scored_agent)).run(client, 0, placed([{}]))
    assert [one.reward for one in group] == [5.0, 5.0]


async def test_an_agent_has_max_turns_too() -> None:
    client = Scripted(byte_tokenizer(), says("1", "22", "333"))
    (group,) = await runner(led_by(endless), max_turns=3).run(client, 0, placed([{}]))
    assert [(one.end, one.reward, len(one.turns)) for one in group] == [("max_turns", 3.0, 3)] * 2


async def test_an_agent_that_never_asks_is_an_error() -> None:
    client = Scripted(byte_tokenizer(), says("1"))
    with pytest.raises(UserError, match=r"agent_import_path.*never asked the policy"):
        await runner(led_by(silent)).run(client, 0, placed([{}]))


# --- environments -------------------------------------------------------------------------------


def test_messages_are_dressed() -> None:
    messages: list[Message] = [AGAIN, {"role": "assistant", "content": "x"}, ASK]
    assert dressed(messages, "Be short.", "Q: {prompt} {a}") == [
        {"role": "system", "content": "Be short."},
        AGAIN,
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "Q: Say. {a}"},
    ]
    own = [{"role": "system", "content": "Own."}, ASK]
    assert dressed(own, "Be short.", None) == own


async def test_guessing_a_number() -> None:
    stage = EnvironmentStage(section(GuessNumber, high=9, reward_for_valid=0.25))
    heard = {"5": "Higher.", "9": "Lower.", "no": "Say a number."}
    for answers, reward, hint in [
        (("5", "7"), 1.0, heard["5"]),
        (("9", "It is 7"), 1.0, heard["9"]),
        (("no", "3"), 0.25, heard["no"]),
        (("5", "99"), 0.0, heard["5"]),
    ]:
        client = Scripted(byte_tokenizer(), says(*answers))
        (group,) = await runner(stage).run(client, 0, placed([{"number": 7}]))
        assert group[0].reward == reward
        assert group[0].messages[2]["content"] == hint
        assert group[0].metrics["guesses"] == 2.0
    client = Scripted(byte_tokenizer(), says("7"))
    (group,) = await runner(stage).run(client, 0, placed([{"number": 7}]))
    assert (group[0].reward, len(group[0].turns)) == (1.0, 1)
    assert GuessNumber.check_row({"number": "7"}, "x") is not None
    with pytest.raises(UserError, match="the number 12 is not from 1 to 9"):
        await runner(stage).run(client, 0, placed([{"number": 12}]))


# --- from rewards to numbers --------------------------------------------------------------------


def rolled(reward: float, tokens: int, cut: bool = False, **more: Any) -> Rollout:
    turn = Turn([1], list(range(tokens)), [-0.5 * (n + 1) for n in range(tokens)], cut)
    given = {"group": 0, "messages": [], "end": "stop", "metrics": {}, "retries": 0}
    return Rollout(turns=[turn], reward=reward, **given | more)


def test_metrics_by_hand() -> None:
    groups = [
        [rolled(1.0, 1), rolled(1.0, 3, cut=True)],
        [rolled(0.0, 1, metrics={"calls": 2.0}), rolled(0.0, 1, retries=2)],
        [rolled(0.0, 1), rolled(1.0, 1)],
        [rolled(0.25, 2, metrics={"calls": 1.0}), rolled(0.75, 2)],
    ]
    metrics = rollout_metrics(groups)
    deviations = 6 * 0.5**2 + 2 * 0.25**2  # from a mean of 4 / 8
    assert metrics.pop("reward/std") == pytest.approx(math.sqrt(deviations / 8), abs=1e-15)
    surprise = 5 * 0.5 + (0.5 + 1.0 + 1.5) + 2 * (0.5 + 1.0)
    assert metrics.pop("sampling/entropy") == pytest.approx(surprise / 12, abs=1e-15)
    assert metrics == {
        "reward/mean": 0.5,
        "reward/n_trajectories": 8.0,
        "reward/n_groups": 4.0,
        "reward/groups_all_good": 0.25,
        "reward/groups_all_bad": 0.25,
        "reward/groups_mixed": 0.5,
        "rollout/tokens": 12 / 8,
        "rollout/turns": 1.0,
        "rollout/truncated": 1 / 8,
        "rollout/retries": 2.0,
        "env/calls": 1.5,
    }


def test_constant_groups_are_dropped_by_choice() -> None:
    group = [rolled(1.0, 1), rolled(1.0, 2)]
    assert [one.advantage for one in scored(group, "mean", True)] == [None, None]
    assert all(not one.examples() for one in scored(group, "mean", True))
    kept = scored(group, "mean", False)
    assert [one.advantage for one in kept] == [0.0, 0.0]
    assert [len(one.examples()) for one in kept] == [1, 1]
    mixed = scored([rolled(1.0, 1), rolled(0.0, 1)], "mean", True)
    assert [one.transcript().advantage for one in mixed] == [0.5, -0.5]


async def test_the_kl_penalty_is_added_to_sampled_tokens_only() -> None:
    group = scored([rolled(1.0, 1), rolled(0.0, 2)], "mean", True)
    examples = [example for one in group for example in one.examples()]
    base = Scripted(byte_tokenizer(), says("x"))  # finds every token -0.25
    penalised, kl = await kl_penalised(examples, base, 0.5)
    # d = -0.5 + 0.25, -0.5 + 0.25, -1 + 0.25: mean -1.25 / 3
    assert kl == pytest.approx(-1.25 / 3)
    first, second = (one.advantages.tolist() for one in penalised)
    assert first == pytest.approx([0.0, 0.5 + 0.5 * (-1.25 / 3 + 0.25)])
    assert second == pytest.approx(
        [0.0, -0.5 + 0.5 * (-1.25 / 3 + 0.25), -0.5 + 0.5 * (-1.25 / 3 + 0.75)]
    )


async def test_dro_is_given_the_samplers_view_of_tokens_that_it_did_not_sample() -> None:
    turns = [Turn([1, 2], [3], [-2.0], False)]
    (segment,) = segments(turns)
    (example,) = scored([rolled(1.0, 1), rolled(0.0, 1)], "mean", True)[0].examples()
    from dataclasses import replace

    anchor = Scripted(byte_tokenizer(), says("x"))
    (one,) = await anchored([replace(example, segment=segment)], anchor)
    assert one.segment.logprobs.tolist() == [0.0, -0.25, -2.0]
