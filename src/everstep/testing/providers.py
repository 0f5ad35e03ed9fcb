"""Checks of the contract of a :class:`everstep.Provider`, for users' own providers.

Each check of :data:`CHECKS` is a function of a :class:`Subject` that raises ``AssertionError``
where the contract is broken. They need no test framework, no run folder and no keeper::

    for result in conformance(Subject(ReplayBuffer, change=lambda buffer: buffer.add(...))):
        print(result)

and with pytest each check becomes a test::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_replay_buffer(check):
        check(Subject(ReplayBuffer, change=...))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everstep.restore.load.targets import restore_into
from everstep.state.layout import OBJECT_PREFIX, Entry
from everstep.state.layout.entries import OBJECT_BYTES_MAX
from everstep.state.providers.chunks import Provider
from everstep.state.survey import Survey
from everstep.state.training_state import State
from everstep.state.values.objects import decode
from everstep.state.values.tensors import byte_view
from everstep.testing.conformance import Result, run_checks

_SECTION = "provider"


@dataclass(frozen=True, slots=True)
class Subject:
    """A class of providers under test.

    Attributes:
        make: returns a new provider, as a program that starts makes it; each time with the same
            state.
        change: changes the state of a provider as a training step does, the same way each time.
    """

    make: Callable[[], Provider]
    change: Callable[[Any], object]


Check = Callable[[Subject], None]


def conformance(subject: Subject) -> list[Result]:
    """Run all checks, whatever one of them finds."""
    return run_checks(CHECKS, subject)


class _Saved:
    """State of a provider as a base holds it.

    Attributes:
        objects: bytes of everything that is not memory.
        tensors: copies of the memory, by entry name.
        entries: entries of the tensors, by name and alias.
    """

    def __init__(self, survey: Survey) -> None:
        self.tensors = {name: one.clone() for name, one in survey.tensors.items()}
        entries = {entry.name: entry for entry in survey.shape.entries}
        names = survey.shape.aliases.items()
        self.entries: Mapping[str, Entry] = entries | {a: entries[name] for a, name in names}
        self.objects = survey.objects()

    def differences(self, other: _Saved) -> list[str]:
        """Return the names of the entries that differ."""
        names = {**self.entries, **other.entries, **self.objects, **other.objects}
        return [name for name in names if self._bytes_of(name) != other._bytes_of(name)]

    def restore(self, provider: Provider) -> None:
        """Restore the state into a provider."""
        trees = {
            name.removeprefix(OBJECT_PREFIX): decode(one) for name, one in self.objects.items()
        }
        restore_into(_state_of(provider), trees, self.entries, self.tensors, step=0)

    def _bytes_of(self, name: str) -> tuple[object, bytes] | bytes | None:
        if name in self.objects:
            return self.objects[name]
        entry = self.entries.get(name)
        if entry is None:
            return None
        tensor = self.tensors[entry.name]
        form = entry.dtype, entry.logical_dtype, entry.shape
        return form, bytes(byte_view(tensor.cpu().contiguous()))


def _state_of(provider: Provider) -> State:
    return State({_SECTION: provider}, rng=False)


def _saved(provider: Provider) -> _Saved:
    return _Saved(_state_of(provider).survey())


def _changed(subject: Subject, times: int = 1) -> Provider:
    provider = subject.make()
    for _ in range(times):
        subject.change(provider)
    return provider


def its_chunks_can_be_stored(subject: Subject) -> None:
    """Names are valid and occur once, contents can be stored, and functions return bytes."""
    for provider in (subject.make(), _changed(subject)):
        sizes = {name: len(data) for name, data in _saved(provider).objects.items()}
        large = [name for name, size in sizes.items() if size > OBJECT_BYTES_MAX]
        assert not large, "more than 1 GiB is not memory"


def change_changes_its_state(subject: Subject) -> None:
    """Without that the other checks would find nothing."""
    differs = _saved(subject.make()).differences(_saved(_changed(subject)))
    assert differs, "change() changes no chunk"


def saving_changes_nothing(subject: Subject) -> None:
    """A provider that is saved twice has the same state, and so has one that was never saved."""
    provider = _changed(subject)
    first = _saved(provider)
    assert not (names := first.differences(_saved(provider))), f"another state: {names}"
    subject.change(provider)
    never = _saved(_changed(subject, 2))
    assert not (names := never.differences(_saved(provider))), f"saving has changed {names}"


def a_function_reads_what_was_there(subject: Subject) -> None:
    """The function of a chunk returns the state at the save, though the provider has changed."""
    provider = _changed(subject)
    expected = _saved(provider).objects
    survey = _state_of(provider).survey()
    subject.change(provider)
    assert survey.objects() == expected, "a function reads what changes after chunks() returns"


def a_new_provider_takes_the_state(subject: Subject) -> None:
    """A program that starts again has the saved state."""
    saved = _saved(_changed(subject, 2))
    provider = subject.make()
    saved.restore(provider)
    assert not (names := saved.differences(_saved(provider))), f"restored otherwise: {names}"


def a_provider_in_use_takes_the_state(subject: Subject) -> None:
    """A provider that has changed since takes the saved state back."""
    provider = _changed(subject)
    saved = _saved(provider)
    for _ in range(3):
        subject.change(provider)
    saved.restore(provider)
    assert not (names := saved.differences(_saved(provider))), f"restored otherwise: {names}"


def a_restored_provider_continues(subject: Subject) -> None:
    """It changes as the saved one would have: nothing that counts is missing in its chunks."""
    saved = _saved(_changed(subject, 2))
    provider = subject.make()
    saved.restore(provider)
    expected = _changed(subject, 2)
    for _ in range(2):
        subject.change(provider)
        subject.change(expected)
    names = _saved(expected).differences(_saved(provider))
    assert not names, f"continues otherwise: {names}"


def the_saved_state_is_its_own(subject: Subject) -> None:
    """Two providers that restore the same state share no memory."""
    saved = _saved(_changed(subject))
    one = subject.make()
    other = subject.make()
    saved.restore(one)
    saved.restore(other)
    before = _saved(other)
    subject.change(one)
    assert not (names := before.differences(_saved(other))), f"two providers share {names}"


CHECKS: tuple[Check, ...] = (
    its_chunks_can_be_stored,
    change_changes_its_state,
    saving_changes_nothing,
    a_function_reads_what_was_there,
    a_new_provider_takes_the_state,
    a_provider_in_use_takes_the_state,
    a_restored_provider_continues,
    the_saved_state_is_its_own,
)
"""All checks of a provider."""
