"""How far a kernel may be from its definition: one table, derived, never loosened in a test.

``u`` is the unit roundoff of a dtype, half the step between neighbours relative to the value:

==========  ========  =============================================
dtype       u         significand
==========  ========  =============================================
float16     2^-11     11 bits
bfloat16    2^-8      8 bits
float32     2^-24     24 bits
e4m3        2^-4      4 bits
==========  ========  =============================================

**Attention output.** ``o = sum(p * v) / sum(p)``. With ``V`` the largest ``|v|`` (``scale`` below):

- the probabilities of a tensor-core product are rounded to the 16-bit dtype: at most ``u * V``;
- ``o`` is rounded once to its own dtype: at most ``u * |o| <= u * V``;
- float32 logits, exponentials (a hardware ``exp2`` is good to 2^-22) and sums: below ``2^-14 * V``
  for a million keys, since partial sums are short and merged in a tree.

So ``|got - want| <= 2 * u * V``, and for float32 outputs of float32 arithmetic ``2^-14 * V``. A
float32 output of 16-bit operands still has their rounded probabilities: name the operands' dtype.

**fp8.** Where queries, keys and values are all e4m3 a kernel may round weights to e4m3, up to 2^8
before they are divided by their sum, which is that of the exact ones: ``u * V``. Those below e4m3's
normal numbers, ``2^-6``, are off by ``2^-10`` at most, ``2^-18`` of the largest: ``2^-4 * V`` for
2^14 keys. ``2 * u * V`` holds both; o is bfloat16 then, which adds its ``2^-8 * V``. The queries'
dtype names the bound; fp8 caches with 16-bit queries keep the bound of these. Scores stay within
those of ``LSE_E4M3``. Tensor cores keep 14 bits of sums of e4m3: a sum loses ``2^-15`` of itself on
average with each product of 32 keys, and so one that grows steadily half of that
(``SUM_LOSS_E4M3`` for n keys), where values have one sign. Roundings have either sign: of the mean
of results over many rows and keys they leave less than ``2^-11`` (``MEAN_E4M3``).

**Merge.** The states arrive in the dtype and are weighted in float32: one rounding, ``u * |o|``,
and another where the definition was itself rounded: ``2 * u * |o|``; weights that cancel leave
float32's ``2^-20 * V``.

**lse.** float32, base 2. Logits are float32 sums over ``head_dim <= 256``: below ``2^-11`` in all,
and ``2^-20`` of the value where it is large. A library that adds up the rounded weights of its
tensor-core product (``LSE_OF_ROUNDED``) has a sum that is off by ``u``: ``log2(1 + u)`` more.
Scores of e4m3 (``LSE_E4M3``) are four products of 32 elements, and each loses up to ``2^-13`` of
the sum so far: ``2^-11`` of a score. Those of 128 random elements stay below 62, to base 2 and
scaled below 8: ``2^-8``.

**Soft cap.** A hardware ``tanh`` is allowed while lse stays within 4e-3. A logit that is off by
``d = 4e-3 * ln 2`` changes ratios of weights by ``exp(2 * d) - 1`` at most: ``6e-3 * V`` in o.

**A row of random values** (``ROW_NORM``). Means of many values of mean 0 are far smaller than
``V``, so a bound that scales with ``V`` would let zeros pass. There the norm of a row's error
counts, relative to the row's: each term of ``sum(p * v)`` is off by ``u`` at most, and errors of
random terms add up as the terms do: ``u`` of the sum; rounding o is another ``u``, and both are
exceeded twofold by no row: ``4 * u``. Where two results of kernels are compared, each is that near
to the definition, and they to each other within the sum: ``2 * ROW_NORM``. e4m3 weights are off by
less than half of their ``u`` on average, and so are rows; no row is off by ``u``, and bfloat16's
``4 * u`` for the rest.

**Conversion** (append, gather, copy): no bound; ``assert_same_bits``.
"""

from typing import NamedTuple

import numpy as np


class Bound(NamedTuple):
    """Allowed error of an element: the larger of ``absolute * scale`` and ``relative * |want|``."""

    absolute: float
    relative: float


_U = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}

ATTENTION = {name: Bound(max(2 * u, 2.0**-14), 2 * u) for name, u in _U.items()}
ATTENTION_TANH = {name: Bound(b.absolute + 6e-3, b.relative) for name, b in ATTENTION.items()}
_E4M3 = 2.0**-4
ATTENTION["float8_e4m3fn"] = Bound(2 * _E4M3 + _U["bfloat16"], 2 * _E4M3 + _U["bfloat16"])
MERGE = {name: Bound(2.0**-20, 2 * u) for name, u in _U.items()}
ROW_NORM = {name: 4 * u for name, u in _U.items()}
ROW_NORM["float8_e4m3fn"] = _E4M3 + ROW_NORM["bfloat16"]
SUM_LOSS_E4M3 = 2.0**-15 / 32 / 2  # of the sum, for a key
MEAN_E4M3 = 2.0**-11
LSE = Bound(2.0**-11, 2.0**-20)
LSE_E4M3 = Bound(2.0**-8, 2.0**-11)
LSE_OF_ROUNDED = {n: Bound(LSE.absolute + np.log2(1 + u), LSE.relative) for n, u in _U.items()}
LSE_TANH = Bound(4e-3, 2.0**-20)


def to_numpy(array):
    """Copy an array of either home to NumPy."""
    if isinstance(array, np.ndarray):
        return array
    if array.dtype.name.startswith(
        "float8"
    ):  # CuPy packs no strided array of what it does not know
        return array.view(np.uint8).get().view(array.dtype)
    return array.get()


def assert_close(got, want, bound, *, scale=1.0):
    """Compare element by element: infinities and NaNs at the same places, the rest within bounds.

    Parameters
    ----------
    got, want : arrays of one shape, of either home
    bound : Bound
        From the tables above, such as ``ATTENTION["bfloat16"]``.
    scale : float
        Largest magnitude of what was averaged: ``max|v|`` times ``v_scale`` for attention.
    """
    got, want = (to_numpy(a).astype(np.float64) for a in (got, want))
    assert got.shape == want.shape, f"shape {got.shape}, wanted {want.shape}"
    for what, same in (
        ("NaN", np.isnan(got) == np.isnan(want)),
        ("infinity", np.where(np.isinf(got) | np.isinf(want), got == want, True) | np.isnan(want)),
    ):
        if not same.all():
            _fail(f"{what} where there should be none, or the reverse", ~same, got, want)
    finite = np.isfinite(want)
    error = np.abs(np.subtract(got, want, where=finite, out=np.zeros_like(want)))
    size = np.abs(want, where=finite, out=np.zeros_like(want))
    allowed = np.maximum(bound.absolute * scale, bound.relative * size)
    excess = error / np.maximum(allowed, np.finfo(np.float64).tiny)
    if (excess > 1).any():
        _fail(f"error beyond {bound} * scale {scale:g}", excess, got, want)


def assert_rows_close(got, want, bound):
    """Compare rows by the norm of their errors, relative to their own norms.

    Parameters
    ----------
    got, want : [rows, dim] arrays of either home
    bound : float
        From ``ROW_NORM``.
    """
    got, want = (to_numpy(a).astype(np.float64) for a in (got, want))
    assert got.shape == want.shape, f"shape {got.shape}, wanted {want.shape}"
    assert np.isfinite(got).all(), "a value is not finite"
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    worst = int(np.argmax(error))
    assert error[worst] <= bound, (
        f"row {worst} of {len(got)} is off by {error[worst]:.4f} of itself"
    )


def assert_same_bits(got, want):
    """Compare bit for bit, poison included."""
    got, want = to_numpy(got), to_numpy(want)
    assert got.dtype == want.dtype, f"{got.dtype}, wanted {want.dtype}"
    assert got.shape == want.shape, f"shape {got.shape}, wanted {want.shape}"
    differ = bits(got) != bits(want)
    if differ.any():
        _fail("different bits", differ, got, want)


def bits(array):
    """View an array of either home as NumPy unsigned integers, for comparing bit for bit."""
    host = to_numpy(array)
    return host.view(f"u{host.dtype.itemsize}")


def max_abs(array):
    """Largest finite magnitude of an array, the ``scale`` of what is averaged from it."""
    values = np.abs(to_numpy(array).astype(np.float64))
    return float(np.max(values, where=np.isfinite(values), initial=0.0))


def _fail(what, badness, got, want):
    worst = np.unravel_index(int(np.argmax(badness)), badness.shape)
    count = int(np.count_nonzero(badness if badness.dtype == bool else badness > 1))
    where = ", ".join(map(str, worst))
    raise AssertionError(
        f"{what}: {count} of {got.size} elements; worst at [{where}]: "
        f"got {got[worst]!r}, wanted {want[worst]!r}"
    )
