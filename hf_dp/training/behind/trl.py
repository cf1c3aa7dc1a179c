"""What TRL's trainers have in common: the versions that were tested, the parts that are read, and what is refused."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

from hf_dp.errors import ConfigurationError
from hf_dp.launched import is_first
from hf_dp.training.behind.usual import Usual

# Of TRL. The oldest is in pyproject.toml and constraints-oldest.txt too, the newest in constraints.txt.
OLDEST, NEWEST = (1, 15), (1, 16)
_TESTED = "{}.{} to {}.{}".format(*OLDEST, *NEWEST)
# What makes batches, or steps, of a kind of their own.
_STEPS = ("_get_train_sampler", "training_step", "get_batch_samples")
Conflicts = Iterable[tuple[str, str, str]]


class Unknown(Usual):
    """Of another trainer of TRL, whose loss is not known example by example."""

    def refuse(self, own_loss: bool) -> None:
        kinds = [kind for kind in type(self.trainer).__mro__ if is_of_trl(kind)]
        name = kinds[0].__name__
        if own := next((step for step in _STEPS for kind in kinds if step in vars(kind)), None):
            raise ConfigurationError(
                f"{name} behind DPTrainerMixin.",
                why=f"it learns from answers that it samples and compares, by {own}() of its own, which the private "
                "step replaces: it would be trained for something else.",
                fix="use SFTTrainer on texts, DPOTrainer on pairs of answers, or RewardTrainer; answers that a model "
                "gives and somebody judges can be such pairs.",
            )
        if own_loss:
            return
        raise ConfigurationError(
            f"{name} behind DPTrainerMixin.",
            why="it has a loss of its own, of which nothing is known here example by example; some such trainers mix "
            "rows, or draw what they learn from.",
            fix="use SFTTrainer, DPOTrainer (its loss_type has several losses of pairs) or RewardTrainer; or, where "
            "each row of a batch has a loss of its own, override compute_per_example_loss(model, inputs).",
        )


def is_of_trl(kind: type) -> bool:
    """Whether TRL itself has this class."""
    return kind.__module__.partition(".")[0] == "trl"


class Trl(Usual):
    """Of a trainer of TRL, whose `compute_loss` a private step does not run."""

    name = ""

    def refuse_unknown_loss(self) -> None:
        """Its loss is TRL's, whatever the model's own is."""

    def refuse(self, own_loss: bool) -> None:
        version = importlib.metadata.version("trl")
        minor = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if minor < OLDEST:
            raise ConfigurationError(
                f"TRL {version} behind DPTrainerMixin.",
                why="private training failed with versions so old, which compute their loss in other ways.",
                fix=f"install a version that was tested, {_TESTED}.",
            )
        if minor > NEWEST and is_first():
            _warn_of_a_new_version(version, self.name)
        with self.known_parts():
            for found, why, fix in self.conflicts(own_loss):
                raise ConfigurationError(found, why=why, fix=fix)

    def conflicts(self, own_loss: bool) -> Conflicts:
        """What is found, why it is refused, and what to do; of all trainers of TRL, and then of this one."""
        args = self.trainer.args
        if args.activation_offloading:
            yield (
                "activation_offloading=True.",
                f"{self.name} does it in its own training step, which the private one replaces.",
                "leave it out; gradient checkpointing saves memory too, and is on by default.",
            )
        if (args.model_init_kwargs or {}).get("use_kernels"):
            yield (
                "model_init_kwargs={'use_kernels': True}.",
                "fused kernels use parameters where no rule sees them.",
                "leave it out.",
            )
        if self._adds_router_loss():
            yield (
                "router_aux_loss_coef, for a mixture of experts.",
                "its load balancing, which TRL adds unless it is told not to, is a loss of the whole batch, and no "
                "example's own.",
                f"pass {type(self.trainer.args).__name__}(router_aux_loss_coef=0.0, ...); where its router is frozen "
                "(LoRA on other parts), there is nothing to balance.",
            )

    def forget_batch_metrics(self) -> None:
        """Drops what TRL would log of training batches: entropy, token accuracy, and the number of tokens seen."""
        with self.known_parts():
            self.trainer._metrics["train"].clear()
            self.trainer._metrics["eval"].pop("num_tokens", None)  # of training: nobody counted them

    @contextmanager
    def known_parts(self) -> Iterator[None]:
        """A part of the trainer that is read here and is not there is refused: what it says is not known then."""
        try:
            yield
        except AttributeError as error:
            raise ConfigurationError(
                f"TRL {importlib.metadata.version('trl')} behind DPTrainerMixin ({error}).",
                why=f"without this part of its {self.name} it is not known what was asked for.",
                fix=f"install a version that was tested, {_TESTED}.",
            ) from error

    def _adds_router_loss(self) -> bool:
        config = self.trainer.model.config.get_text_config()
        wanted = getattr(self.trainer.args, "router_aux_loss_coef", None)
        coefficient = getattr(config, "router_aux_loss_coef", 0.0) if wanted is None else wanted
        return hasattr(config, "output_router_logits") and coefficient != 0.0


@cache  # once in a process
def _warn_of_a_new_version(version: str, name: str) -> None:
    warnings.warn(
        f"TRL {version} behind DPTrainerMixin was not tested; {_TESTED} were. What its {name} can be asked for "
        "since then is not known here: look whether the rows of trainer.train_dataset are what you want.",
        stacklevel=2,
    )
