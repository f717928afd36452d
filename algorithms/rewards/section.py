"""The part of a document that says how answers are scored."""

from __future__ import annotations

from typing import Annotated

from algorithms.rewards.verifiers import VERIFIERS, Verifier, VerifierConfig
from algorithms.sections import OneOf, Section, built, with_params


class VerifierSection(Section):
    """How answers are scored."""

    kind: str
    params: VerifierConfig

    def build(self, where: str = "verifier") -> Verifier:
        """The verifier, ready to be called. Raises UserError, naming `where`, if that fails."""
        verifier: Verifier = built(VERIFIERS, self.kind, self.params, where)
        return verifier


VerifierField = Annotated[
    VerifierSection,
    OneOf(VERIFIERS, with_params(VerifierSection, lambda verifier: verifier.Config)),
]
