"""What all nouns share: they show their structure, move between homes and own their copies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

import cupy as cp
import numpy as np

from cukv._arrays import (
    FP8,
    Array,
    CudaUnavailableError,
    home,
    is_available,
    on_device_of,
    to_dlpack,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from cukv._picture import Picture
    from cukv.page_table import PageTable

Self = TypeVar("Self", bound="Noun")

_OF_JAX = "{}: not for nouns over arrays of JAX, which functions of cukv.jax take"


class Noun:
    """Base of the dataclasses: frozen structure over arrays whose contents may be written.

    What a noun works out of its fields once is declared ClassVar, which keeps it out of the
    dataclass's fields, and set on each instance. Equality is identity and nouns hash by it.
    ``repr`` never reads the device. ``copy.deepcopy`` and pickle make nouns that own their buffers.
    """

    def _fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    if not TYPE_CHECKING:  # it would hide wrong names from type checkers

        def __getattr__(self, name: str) -> Any:
            """Say what is missing: over arrays that are neither CuPy's nor NumPy's, all but fields.

            ``cukv.jax.noun`` makes such nouns.
            """
            kind = type(self).__name__
            fields = tuple(vars(self).values())
            if fields and not name.startswith("__") and not _arrays(fields):
                raise AttributeError(_OF_JAX.format(f"{kind}.{name}"))
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    def _set(self, **attributes: Any) -> None:
        """Set fields and cached values while a frozen dataclass is being made."""
        vars(self).update(attributes)

    def _home(self) -> Any:
        """``cupy`` or ``numpy``: where this noun's arrays live."""
        kind, arrays = type(self).__name__, _arrays(self)
        if not arrays:
            raise TypeError(_OF_JAX.format(kind))
        return home(kind, **{f"array {i}": a for i, a in enumerate(arrays)})

    def show(self) -> Picture:
        """Draw the layout with its contents. Synchronises if the noun is on a GPU.

        Returns
        -------
        Picture
            Jupyter shows it, light or dark; ``print`` says the same in words. Large nouns are
            summarised. Contents that are not valid are not drawn: it says what is wrong.
        """
        from cukv._show import picture  # which knows all nouns

        self._home()  # of arrays of JAX there is none
        return picture(self, read=True)

    def plot(self, ax: Any = None) -> Any:
        """Draw what ``show`` draws with matplotlib. Synchronises if the noun is on a GPU.

        Parameters
        ----------
        ax : matplotlib.axes.Axes
            Where to draw; None makes a figure of the right size.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ModuleNotFoundError
            matplotlib is not installed.
        TypeError
            ``ax`` is no axes.
        """
        _check_axes(type(self).__name__, ax)
        return self.show().plot(ax)

    def _repr_html_(self) -> str | None:
        """Draw the layout in Jupyter; of a noun on a GPU its structure, as nothing is read."""
        if not _arrays(self):
            return None  # arrays of JAX, maybe while a function is traced: repr says enough
        from cukv._show import picture

        return picture(self, read=False)._repr_html_()

    def _structure(self) -> list[str]:
        """Give a line for each field: its name, and dtype and shape or value."""
        return [f"{n}: {_show(v)}" for n, v in self._fields().items() if v is not None]

    def __repr__(self) -> str:
        fields = ", ".join(f"{n}={_show(v)}" for n, v in self._fields().items() if v is not None)
        arrays = _arrays(self)
        where = ""  # arrays of JAX say it themselves
        if arrays:
            on_host = isinstance(arrays[0], np.ndarray)
            where = f", device={'numpy' if on_host else f'cuda:{arrays[0].data.device_id}'}"
        return f"{type(self).__name__}({fields}{where})"

    def to_host(self: Self) -> Self:
        """Copy to NumPy arrays. Synchronises; a noun that is there already is returned as it is."""
        if self._home() is np:
            return self
        return self._map(_as_bytes(lambda a: a.get()))

    def to_device(self: Self) -> Self:
        """Copy to CuPy arrays on the current device; a noun on a GPU is returned as it is.

        Raises
        ------
        CudaUnavailableError
            There is no GPU.
        """
        if self._home() is cp:
            return self
        if not is_available():
            raise CudaUnavailableError(f"{type(self).__name__}.to_device")
        return self._map(_as_bytes(cp.asarray))

    def __copy__(self: Self) -> Self:
        return self._map(lambda a: a)

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self._map(_as_bytes(_copy))

    def __reduce__(self) -> tuple[Any, ...]:
        if not _arrays(self):  # arrays of JAX, which pickle themselves
            return _restore, (type(self), vars(self))
        host = tuple(self.to_host()._fields().values())
        return _rebuild, (type(self), host, self._home() is cp)

    def _map(self: Self, change: Callable[[Array], Array]) -> Self:
        """Make the same noun over changed arrays; those of JAX never change, and are shared."""
        if not _arrays(self):
            return _restore(type(self), vars(self))
        return type(self)(*(_map(value, change) for value in self._fields().values()))


class ArrayNoun(Noun):
    """A noun that exports its ``data`` through DLPack, bfloat16 and fp8 with their own codes."""

    data: Array

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Export ``data``, zero-copy, ordered after CuPy's current stream."""
        return to_dlpack(self._exported(), **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Give ``data`` to NumPy; CuPy's is a TypeError, as ``to_host`` is not implied."""
        array = self._exported()
        if isinstance(array, cp.ndarray):
            raise TypeError(
                f"{type(self).__name__} is on a GPU: use .to_host() to copy it to NumPy"
            )
        return np.array(array, dtype=dtype, copy=copy)

    def __dlpack_device__(self) -> Any:
        """DLPack device of ``data``."""
        return self._exported().__dlpack_device__()

    def _exported(self) -> Array:
        if isinstance(self.data, tuple):
            names = [n for n in ("k", "v", "ckv", "kpe") if hasattr(self, n)]
            raise BufferError(
                f"{type(self).__name__}: a pair of arrays is not one DLPack array; "
                f"export .{names[0]} and .{names[1]}"
            )
        return self.data


class CacheNoun(ArrayNoun):
    """A cache in pages, which is drawn with their owners where a page table names them."""

    def show(self, table: PageTable | None = None) -> Picture:
        """Draw the pages and where tokens lie in them. Reads nothing of the cache's contents.

        Parameters
        ----------
        table : PageTable
            Says which request owns which page; read, so that this synchronises if it is on a GPU.

        Returns
        -------
        Picture
            Jupyter shows it, light or dark; ``print`` says the same in words. Large caches are
            summarised.

        Raises
        ------
        TypeError, ValueError
            No page table, or one of another page size.
        """
        from cukv._show import picture

        self._home()
        return picture(self, table, read=True)

    def plot(self, ax: Any = None, table: PageTable | None = None) -> Any:
        """Draw what ``show`` draws with matplotlib. Synchronises as ``show`` does.

        Parameters
        ----------
        ax : matplotlib.axes.Axes
            Where to draw; None makes a figure of the right size.
        table : PageTable
            Says which request owns which page.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ModuleNotFoundError
            matplotlib is not installed.
        TypeError, ValueError
            No axes, no page table, or one of another page size.
        """
        _check_axes(type(self).__name__, ax)
        return self.show(table).plot(ax)


def _check_axes(noun: str, ax: Any) -> None:
    if ax is None or hasattr(ax, "transAxes"):
        return
    way_out = "; pass it as table=" if type(ax).__name__ == "PageTable" else ""
    raise TypeError(f"{noun}.plot: ax must be axes of matplotlib, got {type(ax)}{way_out}")


def _as_bytes(change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Change fp8 arrays as bytes: CuPy moves and copies no dtype that it does not know."""

    def changed(array: Array) -> Array:
        if array.dtype not in FP8:
            return change(array)
        return change(array.view(np.uint8)).view(array.dtype)

    return changed


def _copy(array: Array) -> Array:
    if isinstance(array, np.ndarray):
        return array.copy()
    with on_device_of(array):  # CuPy copies to the current device
        return array.copy()


def _rebuild(noun: type[Self], fields: tuple[Any, ...], on_device: bool) -> Self:
    """Unpickle a noun, onto the current device if it was on one."""
    made = noun(*fields)
    return made.to_device() if on_device else made


def _restore(noun: type[Self], attributes: dict[str, Any]) -> Self:
    """Make a noun of what one had, without looking at it."""
    made = object.__new__(noun)
    made._set(**attributes)
    return made


def _map(value: Any, change: Callable[[Array], Array]) -> Any:
    if isinstance(value, (cp.ndarray, np.ndarray)):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_map(v, change) for v in value)
    return value._map(change) if isinstance(value, Noun) else value


def _arrays(value: Any) -> list[Array]:
    if isinstance(value, (cp.ndarray, np.ndarray)):
        return [value]
    if isinstance(value, Noun):
        value = tuple(value._fields().values())
    return [a for v in value for a in _arrays(v)] if isinstance(value, tuple) else []


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_show, value))})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype.name}{list(value.shape)}"
    return repr(value)
