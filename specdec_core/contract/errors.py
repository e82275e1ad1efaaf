"""Every error specdec raises on purpose. Each carries one line: the culprit, the value, the remedy.

    SpecdecError
    ├── UsageError (ValueError)           a wrong value or option; plugins raise this one, see below
    │   ├── InvalidParameter              a parameter has a value it cannot have
    │   ├── InvalidSpec                   a `name:option=value` text, or an option in it, is wrong
    │   ├── UnknownPlugin                 no drafter, verifier or plugin has this name
    │   ├── AmbiguousPlugin               several distributions registered this name
    │   └── IncompatiblePair              drafter and verifier, or drafter and target, do not fit
    ├── UnsupportedModel (ValueError)     the model cannot be served: its cache cannot be rolled back, ...
    ├── DrafterError                      a drafter failed in mid-run
    │   └── DraftContractViolation        it returned, but broke a rule of the contract
    ├── VerifierError                     a verifier raised, or its verdict broke a rule of the contract
    ├── ConstraintError                   a constraint leaves nothing to say
    ├── PluginError                       a plugin could not be loaded, or broke while it was being built
    └── DecoderBusy (RuntimeError)        a decoder was called from within a round of its own

**For plugin authors.** Raise `UsageError` (or a subclass) from a config validator, `__init__` or `bind`
to refuse something with a reason: the command line shows that one line and exits with 2. Any other
exception raised while a drafter is built counts as a fault of the plugin and becomes a `PluginError`
that names it. In mid-run a drafter needs no error class: whatever it raises, the run goes on without it.
"""

from __future__ import annotations


class SpecdecError(Exception):
    """Base of all errors of specdec. The message is always one line; line breaks become spaces.

    Attributes:
        results: where one request of a `generate` call failed, the results of all, in their order, None for
            those that have none; else None.
    """

    results: list[object] | None = None

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))


class UsageError(SpecdecError, ValueError):
    """A wrong value or option: the message names the culprit, the value and the remedy.

    Plugins raise it while they are built or bound; the command line shows its one line and exits with 2.
    """


class InvalidParameter(UsageError):
    """A parameter has a value it cannot have."""


class InvalidSpec(UsageError):
    """A text such as `prompt_lookup:max_ngram=3` cannot be read, or names a wrong option or value."""


class UnknownPlugin(UsageError):
    """No drafter, verifier or plugin has this name; the message lists those there are."""


class AmbiguousPlugin(UsageError):
    """More than one distribution registered this name; the message tells how to choose."""


class IncompatiblePair(UsageError):
    """Two parts do not fit together, such as a drafter and a verifier; the message names both sides."""


class UnsupportedModel(SpecdecError, ValueError):
    """The model cannot be served; the message names the layer type or feature that stands in the way."""


class DrafterError(SpecdecError):
    """A drafter failed in mid-run. Raised with `strict=True`; otherwise its text is the run's warning.

    Attributes:
        drafter: the drafter's name.
        rule: what it did wrong, in words; empty when it simply raised.
    """

    def __init__(self, message: str, *, drafter: str = "", rule: str = "") -> None:
        super().__init__(message)
        self.drafter = drafter
        self.rule = rule


class DraftContractViolation(DrafterError):
    """A drafter's answer broke a rule of the contract, such as a token id outside the vocabulary."""


class VerifierError(SpecdecError):
    """A verifier raised, or its verdict broke a rule of the contract, such as a path to no node.

    Attributes:
        verifier: the verifier's name.
        rule: what it did wrong, in words; empty when it simply raised.
    """

    def __init__(self, message: str, *, verifier: str = "", rule: str = "") -> None:
        super().__init__(message)
        self.verifier = verifier
        self.rule = rule


class ConstraintError(SpecdecError):
    """A row's constraint leaves nothing to say, nor lets the text end; the message names it."""


class PluginError(SpecdecError):
    """A plugin could not be loaded, or broke while it was being built; it is chained to the cause.

    Attributes:
        distribution, version, entry_point: which plugin; empty where that is not known.
    """

    def __init__(
        self, message: str, *, distribution: str = "", version: str = "", entry_point: str = ""
    ) -> None:
        super().__init__(message)
        self.distribution = distribution
        self.version = version
        self.entry_point = entry_point


class DecoderBusy(SpecdecError, RuntimeError):
    """A decoder was called from within a round of its own: by a drafter, a verifier, or who watches."""
