import json
import tarfile

from tests.analysis.test_nccl_times import LOGS, sample


def test_nccls_times_are_shown_by_unit_and_communicator(invoke, tmp_path):
    with tarfile.open(LOGS) as archive:
        archive.extractall(tmp_path, filter="data")
    run, logs = sample("hsdp-4-ranks").source, tmp_path / "hsdp-4-ranks"
    given = ("show", "samples/hsdp-4-ranks", "nccl", "--inspector", logs)
    shown = invoke(*given).out
    assert "3,100 of 3,118 logged collectives of ranks 0, 2 are matched to the run." in shown
    assert "layers.0        reduce-scatter  100   721 KiB" in shown
    assert "0xabc100 (replicate)  all-reduce" in shown
    printed = json.loads(invoke(*given, "--rank", "2", "--json").out)
    assert printed["run_id"] == run.manifest.run_id
    assert printed["ranks"] == [2]
    assert {row["count"] for row in printed["units"]} == {50, 100}


def test_the_section_names_the_option_that_it_needs(invoke):
    ended = invoke("show", "samples/hsdp-4-ranks", "nccl")
    assert ended.code == 2
    assert "--inspector LOGS" in ended.err
    ended = invoke("show", "samples/hsdp-4-ranks", "units", "--inspector", "logs")
    assert ended.code == 2
    assert "nccl" in ended.err
