"""Passes and optimizer steps. See `core` for what methods promise."""

from __future__ import annotations

from functools import partial
from typing import Final

from backends.engine import wire
from backends.engine.core import Core, Failed, json_answer, logged, nothing
from backends.engine.ledger import Answer, Model, Ticket
from backends.engine.losses import check_request
from backends.engine.records import OptimStepOutput, PassOutput, PassRequest, RequestError
from backends.engine.scheduler import Job
from backends.errors import Problem, UserError

BLIND: Final = Problem(
    "optim_step",
    "a forward_backward before it failed; the step was not taken",
    "the gradients of the whole batch are dropped: send all of its passes again, and then a step",
)


class Training:
    """What moves a model's weights."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def forward_backward(self, body: wire.PassBody) -> Ticket:
        """A forward pass, and a backward pass unless it is forward only. Raises Unknown."""
        core = self._core
        model = core.ledger.model(body.model_id)
        ticket, new = core.numbered(model, body.seq_id)
        if not new:
            return ticket
        problem = body.problem or check_request(
            body.loss_fn,
            body.data,
            body.loss_config,
            vocab_size=core.limits.vocab_size,
            max_length=core.limits.max_context_length,
        )
        if problem:
            core.refuse(ticket, problem)
            note = nothing if body.forward_only else partial(model.failed_passes.append, ticket)
            return core.queue(model, ticket, body.seq_id, Job(note, logged))
        config = {key: float(value) for key, value in body.loss_config.items()}

        def run() -> PassOutput:
            request = PassRequest(
                ticket.request_id, model.id, model.version, body.data, body.loss_fn, config
            )
            compute = core.backend.forward if body.forward_only else core.backend.forward_backward
            output = compute([request])[ticket.request_id]
            if isinstance(output, RequestError):
                if not body.forward_only:
                    model.failed_passes.append(ticket)
                raise Failed(output)
            return output

        return core.change(model, ticket, body.seq_id, run, _pass_answer)

    def optim_step(self, body: wire.OptimStep) -> Ticket:
        """One AdamW step. Raises Unknown."""
        core = self._core
        model = core.ledger.model(body.model_id)
        ticket, new = core.numbered(model, body.seq_id)
        if not new:
            return ticket
        if body.optimizer_params is not None or body.adam_params is None:
            problem = "optim_params: this engine has AdamW only; send AdamParams"
            return core.refuse(ticket, problem, model, body.seq_id)
        adam = body.adam_params.record()

        def run() -> OptimStepOutput:
            if _blind(model, ticket):
                core.backend.clear_gradients(model.id)
                raise UserError(BLIND)
            output = core.backend.optim_step(model.id, model.version, adam)
            model.version = output.version
            return output

        return core.change(model, ticket, body.seq_id, run, _step_answer)


def _blind(model: Model, ticket: Ticket) -> bool:
    """Whether a step was sent before its client could know that a pass before it had failed.

    A pipelined step would otherwise move the weights by part of a batch, or by none of it.
    """
    blind = any(
        failed.fetched is None or failed.fetched > ticket.created for failed in model.failed_passes
    )
    model.failed_passes.clear()
    return blind


def _pass_answer(output: PassOutput) -> Answer:
    return Answer(wire.pass_result(output), wire.PROTOBUF)


def _step_answer(output: OptimStepOutput) -> Answer:
    return json_answer(metrics=dict(output.metrics))
