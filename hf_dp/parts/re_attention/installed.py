"""Re-Attention on a model: patched, followed through each pass, and removed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel

from hf_dp.config import ReAttentionConfig
from hf_dp.errors import ConfigurationError, UnsupportedModelError
from hf_dp.parts.re_attention.attention import NAME, OWNERS, KeyNoise, Listener, register
from hf_dp.parts.re_attention.corrections import Corrections
from hf_dp.parts.re_attention.moments import Moments, Tracked, Variance
from hf_dp.parts.re_attention.refused import refuse_copies, refuse_embedded, refuse_encoded
from hf_dp.parts.re_attention.rules import RULES
from hf_dp.parts.re_attention.saved import FILE, write
from hf_dp.per_example.watched import tensors_in


class ReAttention:
    """The correction on one model.

    Args:
        model: a Transformers model whose attention goes through the attention interface, or a PEFT model around one.
        config: fidelity and scale.

    Attributes:
        errors: the paper's effective errors, the standard deviation of the noise in each trainable parameter, by name:
            (), or (rows, 1). Empty: plain attention.

    Raises:
        UnsupportedModelError: an attention that does not go through the interface, or is none.
    """

    def __init__(self, model: nn.Module, config: ReAttentionConfig) -> None:
        remove_re_attention(model)
        self.config = config
        self.errors: dict[str, Tensor] = {}
        self.listener: Listener | None = None
        self._moments: Moments | None = None
        self._within: list[int] = []
        # None of these may keep a model alive.
        self._kept: WeakKeyDictionary[nn.Module, list[Tensor]] = WeakKeyDictionary()
        self._fired: WeakSet[nn.Module] = WeakSet()
        self.corrections = Corrections()
        self._names = WeakKeyDictionary({m: name for name, m in model.named_modules() if _is_attention(m)})
        bases = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        if not bases or not self._names:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no attention that Transformers' attention interface reaches.",
                why="Re-Attention is an attention implementation of that interface.",
                fix="leave re_attention out of PrivacyConfig.",
            )
        self.before = str(bases[0].config._attn_implementation)
        self._model, self._base = weakref.ref(model), weakref.ref(bases[0])
        register()
        for base in bases:
            base.set_attn_implementation(NAME)
        # What lies around a Transformers model, as PEFT's prompts do, may add noise too.
        self._handles = [
            handle
            for module in ([] if model in bases else [model]) + bases
            for handle in (
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True, always_call=True),
            )
        ]
        for module in self._names:
            OWNERS[module] = self

    def remove(self) -> None:
        """Plain attention again."""
        for handle in self._handles:
            handle.remove()
        for module in list(self._names):
            OWNERS.pop(module, None)
        base = self._base()
        for part in [] if base is None else base.modules():
            if isinstance(part, PreTrainedModel):
                part.set_attn_implementation(self.before)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReAttention:
        """For a model that is copied as a whole: the copy has its own."""
        made = object.__new__(ReAttention)
        memo[id(self)] = made
        apart: dict[str, Any] = {"_moments": None, "_within": [], "_kept": WeakKeyDictionary(), "_fired": WeakSet()}
        # Of a copied part the whole is gone: that of the original has other parameters.
        apart |= {name: _weak(memo.get(id(getattr(self, name)()))) for name in ("_model", "_base")}
        apart["_names"] = WeakKeyDictionary({copy.deepcopy(m, memo): name for m, name in self._names.items()})
        made.__dict__.update(copy.deepcopy({k: v for k, v in self.__dict__.items() if k not in apart}, memo) | apart)
        for module in made._names:
            OWNERS[module] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For a model that is pickled as a whole, as torch.save does: nothing of a pass, and no weak references."""
        strong = {"_model": self._model(), "_base": self._base(), "_names": dict(self._names)}
        return {**self.__dict__, **strong, "_moments": None, "_within": [], "_kept": None, "_fired": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        refs = {name: _weak(state[name]) for name in ("_model", "_base")}
        names = WeakKeyDictionary(state["_names"])
        self.__dict__.update(state, **refs, _names=names, _kept=WeakKeyDictionary(), _fired=WeakSet())
        register()
        for module in self._names:
            OWNERS[module] = self

    # --- one forward pass ---------------------------------------------------------------------------------------------

    @property
    def layers(self) -> dict[nn.Module, str]:
        """The attention modules, with their names."""
        return dict(self._names)

    def _enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if self._within[:1] == [id(module)]:
            # An interrupt, for which no hook is called, ended the last pass: no model calls itself.
            self._end()
        if self._within or not self.errors:
            self._within += [id(module)] if self._within else []
            return
        refuse_copies(module)
        variances = self._variances()
        self._refuse_unknown_inputs(module, kwargs)
        self._within = [id(module)]
        self._kept.clear()
        self._fired.clear()
        if self._moments is None:
            self._moments = Moments(variances, self.config.fidelity == "isotropic", RULES)
        self._moments.begin(variances)
        self._moments.__enter__()  # type: ignore[no-untyped-call]

    def _variances(self) -> dict[int, Tensor]:
        """Of each noisy parameter, by its address as it is now: models are moved, cast and resized."""
        model = self._model()
        parameters = {} if model is None else dict(model.named_parameters())
        found = {}
        for name, error in self.errors.items():
            p = parameters.get(name)
            if p is None or (error.dim() and error.shape[0] != p.shape[0]):
                raise ConfigurationError(
                    f"{name} is not the parameter that its noise was recorded for: it is gone, or of another size.",
                    why="the correction would leave out noise that the keys have.",
                    fix="change the model before Re-Attention is put on it, or call hf_dp.remove_re_attention(model).",
                )
            dtype = torch.promote_types(p.dtype, torch.float32)
            found[p.data_ptr()] = (self.config.scale * error).square().to(p.device, dtype)
        return found

    def _leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._within[-1:] != [id(module)]:
            return
        if len(self._within) > 1:
            self._within.pop()
            return
        self._end()
        # A decoder that generates is given what its encoder said before.
        if module is self._model() and output is not None and kwargs.get("encoder_outputs") is None:
            self._check_fired()

    def _end(self) -> None:
        self._within = []
        if self._moments is not None:
            while self._moments in _get_current_function_mode_stack():
                self._moments.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._moments.end()

    def _refuse_unknown_inputs(self, module: nn.Module, kwargs: dict[str, Any]) -> None:
        whole = self._model()
        if whole is None:
            return
        if module is whole and self._base() is not None and self._is_unknown(kwargs.get("inputs_embeds")):
            refuse_embedded(whole, self.errors)
        if self._is_unknown(next(iter(tensors_in(kwargs.get("encoder_outputs"))), None)):
            refuse_encoded(whole, module, self.errors)

    def _is_unknown(self, given: Tensor | None) -> bool:
        """Whether it is given, and its noise is not known from a pass before."""
        return given is not None and (self._moments is None or self._moments.of(given) is None)

    def _check_fired(self) -> None:
        missed = sorted(name for module, name in self._names.items() if module not in self._fired)
        if missed:
            raise UnsupportedModelError(
                f"attention of {type(self._base()).__name__} that does not use the attention interface: "
                f"{', '.join(missed[:3])}{', ...' if len(missed) > 3 else ''}.",
                why="its scores would not be corrected, while the model says that they are.",
                fix="leave re_attention out of PrivacyConfig for this model family.",
            )

    # --- what the attention function asks and tells -------------------------------------------------------------------

    def key_noise(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> KeyNoise | None:
        """The variances of keys and values, or None if there is no noise."""
        if not self.errors:
            return None
        moments = self._moments
        if not self._within or moments is None:
            # Checkpointing runs the layer again in the backward pass: last in, first out.
            kept = self._kept.get(module)
            noise = kept.pop() if kept else None
            return None if noise is None or not noise.numel() else KeyNoise(noise, None)
        if module in self._fired:
            self._end()
            raise UnsupportedModelError(
                f"{self._names[module]} attends twice in one pass (its layer is shared, or a pass was interrupted).",
                why="the noise of its keys would have to be kept for each use.",
                fix="after an interrupt try again; else leave re_attention out of PrivacyConfig for this model family.",
            )
        self._fired.add(module)
        noise_of_keys, values = moments.variance(key), moments.variance(value)
        keys = None if noise_of_keys is None else noise_of_keys.total
        if moments.lost:
            raise UnsupportedModelError(
                f"{self._names[module]}: the noise of the keys was lost in {', '.join(sorted(moments.lost))}.",
                why="the correction would leave out noise that the keys have.",
                fix="leave re_attention out of PrivacyConfig for this model family.",
            )
        if keys is not None and key.shape[2] > query.shape[2] and _is_partly_zero(keys[..., 0]):
            raise UnsupportedModelError(
                "cached keys of which the noise is not known (beam search reorders the cache outside the model; static "
                "caches and PEFT's prefixes are made there).",
                why="the correction would leave out noise that the keys have.",
                fix="generate with num_beams=1 or use_cache=False, or call hf_dp.remove_re_attention(model) first.",
            )
        if keys is None and values is not None:
            # LoRA on queries and values alone: nothing to correct here, and noise to follow.
            keys = torch.zeros((), dtype=values.own.dtype, device=key.device).expand(key.shape)
        if keys is not None and self.config.fidelity == "isotropic":
            keys = moments.over_features(keys)
            values = None if values is None else values.each(moments.over_features)
        self._kept.setdefault(module, []).append(torch.empty(0) if keys is None else keys)
        if len(self._fired) == len(self._names):
            moments.finish()
            values = None
        return None if keys is None else KeyNoise(keys, values)

    def note_correction(self, module: nn.Module, of_heads: Tensor) -> None:
        """Remembers how much a layer is corrected in one pass, for each example and head (B, H)."""
        self.corrections.note(self._names[module], of_heads)

    def note_output(self, output: Tensor, noise: Variance) -> None:
        """Follows the noise of an attention output."""
        assert self._moments is not None
        self._moments.put(output, Tracked(noise.each(lambda v: v.expand(output.shape))))

    @contextmanager
    def unfollowed(self) -> Iterator[None]:
        """Inside, operations are not followed."""
        if self._moments is None or not self._within:
            yield
            return
        with self._moments.paused():
            yield

    # --- what is saved ------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path, besides: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        """Writes `re_attention.safetensors`: the errors, what is kept besides, and the config in its metadata."""
        write(Path(directory) / FILE, self.config, {**self.errors, **besides})


def _weak(model: Any) -> Any:
    """A weak reference; to nothing, one that says so."""
    return (lambda: None) if model is None else weakref.ref(model)


def _is_partly_zero(noise: Tensor) -> bool:
    """Whether there is noise, and not everywhere. At the beginning of a training there may be none yet."""
    nowhere = noise.eq(0)
    return bool(nowhere.any()) and not bool(nowhere.all())


def _is_attention(module: nn.Module) -> bool:
    def named(one: nn.Module) -> bool:
        return type(one).__name__.endswith("Attention")

    return named(module) and not any(named(child) for child in module.modules() if child is not module)


def installed(model: nn.Module) -> ReAttention | None:
    """The Re-Attention of a model, or of a part of it, if it has one."""
    return next((owner for m in model.modules() if isinstance(owner := OWNERS.get(m), ReAttention)), None)


def remove_re_attention(model: nn.Module) -> None:
    """Gives a model its plain attention back; one without Re-Attention is left as it is."""
    while (found := installed(model)) is not None:
        found.remove()
