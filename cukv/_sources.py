"""Sources of the kernels, read for what only they say: template arguments, parameter structs.

The ``.cu`` file is the only place where the order of template arguments and the layout of the
parameter struct are written: both are read from it.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parent
# A wheel carries the sources inside the package; a checkout has them beside it.
ROOT = next(p for p in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels") if p.exists())


@functools.cache
def source(name: str) -> str:
    """Text of ``kernels/<name>.cu``; includes stay includes."""
    return (ROOT / f"{name}.cu").read_text(encoding="utf-8")


@functools.cache
def _headers() -> str:
    return "\n".join(p.read_text(encoding="utf-8") for p in sorted(ROOT.glob("common/*.cuh")))


@functools.cache
def digest() -> str:
    """Hash every kernel source: an edited header must never find an old cubin."""
    sha = hashlib.sha256()
    for path in sorted(p for p in ROOT.rglob("*") if p.suffix in {".cu", ".cuh"}):
        sha.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def template_names(name: str) -> list[str]:
    """Names of a kernel's template parameters, in order."""
    found = re.search(rf"(?:template <([^>]*)>\s*)?__global__[^;{{]*?\b{name}\(", source(name))
    if found is None:
        raise ValueError(f"kernels/{name}.cu defines no __global__ function {name}")
    return [p.split()[-1] for p in found[1].split(",")] if found[1] else []


_SCALARS = {"int32_t": "i", "uint32_t": "I", "float": "f", "int64_t": "q", "uint64_t": "Q"}


class Layout(NamedTuple):
    """A C struct as Python packs it; nested structs, or arrays of them, are fields of bytes."""

    names: tuple[str, ...]
    codes: tuple[str, ...]  # of each field, with the padding before it; then the padding at the end
    size: int
    alignment: int

    @property
    def format(self) -> str:
        """Format of all of it."""
        return "=" + "".join(self.codes)


@functools.cache
def struct_layout(struct_name: str, kernel_name: str | None = None) -> Layout:
    """Read a parameter struct from the sources, with C's own alignment rules."""
    text = (source(kernel_name) if kernel_name else "") + _headers()
    alias = re.search(rf"^using {struct_name} = (\w+);$", text, re.MULTILINE)
    if alias is not None:
        return struct_layout(alias[1], kernel_name)
    found = re.search(
        rf"struct (?:alignas\((\d+)\) )?{struct_name}(?: : (\w+))? \{{\n(.*?)\n\}};",
        text,
        re.DOTALL,
    )
    if found is None:
        raise ValueError(f"no struct {struct_name} in kernels/{kernel_name}.cu or kernels/common")
    aligned, base, body = found.groups()
    names, codes, size, alignment, gap = [], [], 0, int(aligned or 1), 0
    if base is not None:  # its fields come first, and the padding at its end stays
        inherited = struct_layout(base, kernel_name)
        names, (*codes, tail_code) = [*inherited.names], inherited.codes
        size, alignment = inherited.size, max(alignment, inherited.alignment)
        gap = struct.calcsize(f"={tail_code}")
    # A field is a statement of the struct itself without a call; the rest are member functions.
    body = re.sub(r" *//[^\n]*", "", body)
    for line in re.findall(r"^    ([^\s(][^(\n]*;)$", body, re.MULTILINE):
        parsed = re.fullmatch(r"([\w ]+?[*&]?) (\w+)(?:\[(\d+)\])?;", line)
        if parsed is None or (parsed[3] and parsed[1] in _SCALARS):
            raise ValueError(f"struct {struct_name}: one plain field per line, got {line!r}")
        declared, field, count = parsed.groups()
        if declared == "uint8_t":
            code, width, align = f"{count}s", int(count), 1
        elif declared.endswith("*"):
            code, width, align = "Q", 8, 8
        elif declared in _SCALARS:
            code = _SCALARS[declared]
            width = align = struct.calcsize("=" + code)
        else:
            nested = struct_layout(declared, kernel_name)
            width, align = nested.size * int(count or 1), nested.alignment
            code = f"{width}s"
        pad = -size % align
        codes.append(f"{gap + pad}x{code}")
        size, alignment, gap = size + pad + width, max(alignment, align), 0
        names.append(field)
    tail = -size % alignment
    return Layout(tuple(names), (*codes, f"{tail}x"), size + tail, alignment)


def params_struct(name: str) -> str:
    """Name of a kernel's parameter struct: its own name in camel case, e.g. CopyPagesParams."""
    return "".join(word.capitalize() for word in name.split("_")) + "Params"


def packer(struct_name: str, kernel_name: str | None = None) -> Callable[..., bytes]:
    """Give ``pack(*fields) -> bytes`` for a struct of kernels/common or of one kernel, in order."""
    return struct.Struct(struct_layout(struct_name, kernel_name).format).pack
