"""The sheet of a page keeps the order of the page when a part of it reruns alone."""

from fsdp_inspect_app.page_sheet import PageSheet, SheetText


def texts(sheet):
    return [part.markdown for part in sheet.whole.flat()]


def test_a_section_that_reruns_alone_replaces_its_contents_at_its_place():
    sheet = PageSheet("Timeline")
    sheet.add(SheetText("above"))
    with sheet.section("canvas"):
        sheet.add(SheetText("first"))
    sheet.add(SheetText("below"))
    with sheet.section("canvas"):
        sheet.add(SheetText("second"))
        sheet.add(SheetText("third"))
    assert texts(sheet) == ["above", "second", "third", "below"]


def test_a_section_in_a_section_reruns_alone_or_with_it():
    sheet = PageSheet("What-if")
    for round_ in ("first", "second"):
        with sheet.section("bench"):
            with sheet.section("canvas"):
                sheet.add(SheetText(round_))
            sheet.add(SheetText("units"))
    with sheet.section("canvas"):
        sheet.add(SheetText("third"))
    assert texts(sheet) == ["third", "units"]
