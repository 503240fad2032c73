"""Write measured tables into a page, between marks."""


def replace_section(page: str, name: str, text: str) -> str:
    """Replace the text between the marks of a section.

    Raises:
        ValueError: The page does not have the marks.
    """
    begin, end = f"<!-- {name}: written by `make planted` -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"The page has no section {name!r}. Expected {begin!r} and {end!r} in it.")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
