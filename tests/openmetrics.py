"""Read OpenMetrics 1.0 text with the parser of prometheus_client, which rejects invalid text."""

from dataclasses import dataclass

from prometheus_client.openmetrics.parser import text_string_to_metric_families


@dataclass
class ParsedFamily:
    """A parsed metric."""

    type: str
    unit: str
    help: str
    samples: list[tuple[dict[str, str], float]]

    def value(self, **labels: str) -> float:
        """The only number with these labels."""
        found = [value for own, value in self.samples if labels.items() <= own.items()]
        assert len(found) == 1, (labels, found)
        return found[0]


def parse(text: str) -> dict[str, ParsedFamily]:
    """The metrics of a text, by name.

    Raises:
        ValueError: The text is invalid.
    """
    return {
        family.name: ParsedFamily(
            family.type,
            family.unit,
            family.documentation,
            [(dict(sample.labels), sample.value) for sample in family.samples],
        )
        for family in text_string_to_metric_families(text)
    }
