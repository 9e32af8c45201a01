"""Agreement only: CRAD's filters, and a plain mean of the teachers that pass them (the paper's Stage 1)."""

from typing import Literal

from peer.methods.crad import Crad, CradSettings


class AgreementSettings(CradSettings):
    """The keys of CRAD, with its weights switched off."""

    weighting: Literal["uniform"] = "uniform"


class Agreement(Crad):
    """CRAD's Stage 1."""

    summary = "CRAD's filters without its weights: the plain mean of the teachers that agree (Stage 1)"
    settings_type = AgreementSettings
