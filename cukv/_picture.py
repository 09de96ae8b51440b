"""A drawing of boxes and words: as SVG for notebooks, light and dark, and through matplotlib."""

from __future__ import annotations

import functools
import hashlib
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape

WIDTH = 720  # pixels, what a notebook's cell has on a laptop
SMALL, NORMAL, LARGE = 10, 12, 14  # pixels, sizes of words
CHARACTER = 0.61  # width of a monospaced character, of its size

# Fills 0 to 7 tell requests apart and hold words in `ink`; every box is labelled as well, so that
# nothing is told by colour alone. "shared" belongs to several requests, "plain" to nobody known.
OWNERS = 8
LIGHT = {
    "surface": "#ffffff", "ink": "#1b1f24", "muted": "#57606a", "line": "#8c959f",
    "shared": "#cfd5dc", "plain": "#eef1f4",
    "0": "#a8c8f0", "1": "#f6c08a", "2": "#a9d8ac", "3": "#f3b3c6",
    "4": "#cbb9ec", "5": "#97d9d3", "6": "#ead97c", "7": "#efaaa1",
}  # fmt: skip
DARK = {
    "surface": "#15191e", "ink": "#f0f4f8", "muted": "#a8b2bd", "line": "#717c88",
    "shared": "#48525d", "plain": "#262c33",
    "0": "#24558f", "1": "#874d14", "2": "#2b6834", "3": "#8a3058",
    "4": "#5c449c", "5": "#14656a", "6": "#6a590b", "7": "#8f3b34",
}  # fmt: skip
_MONOSPACE = "ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"

Anchor = Literal["start", "middle", "end"]


class Box(NamedTuple):
    """A rectangle, in pixels from the upper left corner. Without a fill it has a dashed outline."""

    x: float
    y: float
    width: float
    height: float
    fill: str | None
    about: str  # what a pointer resting on it is told
    outline: bool = True


class Words(NamedTuple):
    """A line of text whose middle is at ``y``."""

    x: float
    y: float
    text: str
    size: int
    anchor: Anchor
    role: str  # "ink" or "muted"
    bold: bool


class Picture:
    """A drawing of a layout: shown by Jupyter, plotted by matplotlib, read as text elsewhere.

    ``title`` names what is drawn and ``about`` says in sentences what the drawing shows.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.about = ""
        self.shapes: list[Box | Words] = []
        self.height = 8.0
        self.heading(title, LARGE)

    def __repr__(self) -> str:
        return f"{self.title}\n{self.about}".rstrip()

    # ------------------------------------------------------------------------------------ drawing

    def say(self, sentence: str) -> None:
        """Add a sentence to the text."""
        self.about = f"{self.about} {sentence}".lstrip()

    def heading(self, text: str, size: int = NORMAL) -> None:
        """Write a line below all that is drawn, and go on below it."""
        for line in wrapped(text, WIDTH - 16, size):
            self.words(8, self.height + size * 0.8, line, size, bold=True)
            self.height += size * 1.6

    def note(self, text: str) -> None:
        """Write lines of remarks below all that is drawn."""
        for line in wrapped(text, WIDTH - 16, SMALL):
            self.words(8, self.height + SMALL * 0.7, line, role="muted")
            self.height += SMALL * 1.5
        self.height += 4

    def words(
        self,
        x: float,
        y: float,
        text: str,
        size: int = SMALL,
        anchor: Anchor = "start",
        role: str = "ink",
        bold: bool = False,
    ) -> None:
        """Write a line of text."""
        self.shapes.append(Words(x, y, text, size, anchor, role, bold))

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str | None,
        lines: tuple[str, ...] = (),
        about: str = "",
        full: float = 1.0,
    ) -> None:
        """Draw a rectangle of which the share ``full`` is filled, with the lines that fit into it.

        A line that is too long is left out: ``about`` has to say it too.
        """
        if fill is None or full == 1:
            self.shapes.append(Box(x, y, width, height, fill, about))
        else:
            self.shapes.append(Box(x, y, width * full, height, fill, "", outline=False))
            self.shapes.append(Box(x, y, width, height, None, about))
        lines = tuple(line for line in lines if text_width(line) <= width)
        for i, line in enumerate(lines):
            middle = y + height * (2 * i + 1) / (2 * len(lines))
            self.words(x + width / 2, middle, line, anchor="middle")

    # ------------------------------------------------------------------------------------ showing

    def _repr_html_(self) -> str:
        """Give the drawing as one SVG element that needs nothing from outside."""
        name = "cukv-" + hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        size = f'width="{WIDTH}" height="{self.height:.0f}"'
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" class="cukv-picture" role="img" '
                f'aria-labelledby="{name}-title {name}-about" viewBox="0 0 {WIDTH} '
                f'{self.height:.0f}" {size} style="max-width:100%;height:auto">',
                f'<title id="{name}-title">{escape(self.title)}</title>',
                f'<desc id="{name}-about">{escape(self.about)}</desc>',
                f"<style>{_style()}</style>",
                f'<rect class="cukv-surface" {size}/>',
                *(_svg(shape) for shape in self.shapes),
                "</svg>",
            )
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw on matplotlib axes, in the light colours; None makes a figure of the right size.

        Raises
        ------
        ModuleNotFoundError
            matplotlib is not installed.
        """
        try:
            import matplotlib.pyplot as plt
            from matplotlib.patches import Rectangle
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "plot: needs matplotlib, which pip install 'cukv[notebooks]' brings"
            ) from error
        if ax is None:
            figure = plt.figure(figsize=(WIDTH / 96, self.height / 96))
            ax = figure.add_axes((0, 0, 1, 1))
        inches = ax.get_window_extent().transformed(ax.figure.dpi_scale_trans.inverted())
        points = 72 * min(inches.width / WIDTH, inches.height / self.height)  # of a pixel
        ax.set(xlim=(0, WIDTH), ylim=(self.height, 0), aspect="equal")
        ax.set_axis_off()
        for shape in self.shapes:
            if isinstance(shape, Box):
                filled = shape.fill is not None
                patch = Rectangle(
                    (shape.x, shape.y),
                    shape.width,
                    shape.height,
                    facecolor=LIGHT[shape.fill] if shape.fill is not None else "none",
                    edgecolor=LIGHT["line"],
                    linestyle="solid" if filled else "dashed",
                    linewidth=points if shape.outline else 0,
                )
                ax.add_patch(patch)
            else:
                ax.text(
                    shape.x,
                    shape.y,
                    shape.text,
                    parse_math=False,
                    color=LIGHT[shape.role],
                    family="monospace",
                    fontsize=shape.size * points * 0.97,
                    fontweight="bold" if shape.bold else "normal",
                    horizontalalignment={"start": "left", "middle": "center", "end": "right"}[
                        shape.anchor
                    ],
                    verticalalignment="center_baseline",
                )
        return ax


def text_width(text: str, size: int = SMALL) -> float:
    """Give the width of a line in pixels."""
    return len(text) * CHARACTER * size


def wrapped(text: str, width: float, size: int) -> list[str]:
    """Cut a text into lines of a width, between words."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _svg(shape: Box | Words) -> str:
    if isinstance(shape, Words):
        classes = f"cukv-{shape.role}" + (" cukv-bold" if shape.bold else "")
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        return (
            f'<text class="{classes}" x="{shape.x:.1f}" y="{shape.y + 0.35 * shape.size:.1f}" '
            f'font-size="{shape.size}"{anchor}>{escape(shape.text)}</text>'
        )
    classes = f"cukv-{'none' if shape.fill is None else shape.fill}"
    if shape.outline:
        classes += " cukv-box"
    place = (
        f'<rect class="{classes}" x="{shape.x:.1f}" y="{shape.y:.1f}" '
        f'width="{shape.width:.1f}" height="{shape.height:.1f}"'
    )
    return f"{place}><title>{escape(shape.about)}</title></rect>" if shape.about else f"{place}/>"


@functools.cache
def _style() -> str:
    """Give the colours. They follow the system, and the theme of a JupyterLab that has its own."""

    def colours(palette: dict[str, str]) -> str:
        return "".join(f"--cukv-{name}:{colour};" for name, colour in palette.items())

    fills = [str(i) for i in range(OWNERS)] + ["shared", "plain", "surface"]
    return "".join(
        (
            f".cukv-picture{{{colours(LIGHT)}font-family:{_MONOSPACE}}}",
            f"@media (prefers-color-scheme:dark){{.cukv-picture{{{colours(DARK)}}}}}",
            f"[data-jp-theme-light=true] .cukv-picture{{{colours(LIGHT)}}}",
            f"[data-jp-theme-light=false] .cukv-picture{{{colours(DARK)}}}",
            *(f".cukv-picture .cukv-{n}{{fill:var(--cukv-{n})}}" for n in (*fills, "ink", "muted")),
            ".cukv-picture .cukv-box{stroke:var(--cukv-line)}",
            # fill:none would let the pointer through to what lies below
            ".cukv-picture .cukv-none{fill:transparent;stroke-dasharray:3 2}",
            ".cukv-picture .cukv-bold{font-weight:600}",
        )
    )
