"""The result of a comparison: its table, its figures and its HTML report."""

from pathlib import Path

from pyro_dropout.comparison.figure import draw_bands, draw_scores
from pyro_dropout.comparison.findings import Findings
from pyro_dropout.comparison.report.page import page
from pyro_dropout.errors import PyroDropoutError
from pyro_dropout.protocols import Figure


class Comparison(Findings):
    """The result of ``compare``: one row per posterior, as a table, as figures and as an HTML report.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        >>> model = pdrop.BayesianNet(torch.nn.Linear(1, 1), likelihood=pdrop.Gaussian(tau=100.0))
        >>> options = {"steps": 100, "lr": 0.03, "seeds": 1, "samples": 50, "compile": False, "progress": False}
        >>> guides, train, test = {"mean field": pdrop.AutoMeanField}, (x, 2 * x), (x + 0.1, 2 * x + 0.2)
        >>> found = pdrop.compare(model, guides, train, test, **options)
        >>> [row.name for row in found.rows], found.rows[0].scores["rmse"].mean < 0.2
        (['mean field'], True)
    """

    def plot(self) -> Figure:
        """Draw predictive bands of all guides on shared axes; with several inputs, calibration curves and scores."""
        return draw_bands(self) if self.curves else draw_scores(self)

    def plot_scores(self) -> Figure:
        """Draw calibration curves and the main scores with their errors."""
        return draw_scores(self)

    def to_html(self, path: str | Path) -> Path:
        """Write a self-contained HTML report with table, figures and explanations, and return its path.

        Args:
            path: of the report; an existing file is replaced.
        """
        path = Path(path)
        if path.is_dir():
            raise PyroDropoutError(f"path must be a file to write the page to; {str(path)!r} is a folder.")
        if not path.parent.is_dir():
            raise PyroDropoutError(f"the folder of path does not exist: {str(path.parent)!r}.")
        path.write_text(page(self), "utf-8")
        return path
