"""What the controller remembers of published versions."""

import dataclasses

import torch

from controller.publications import Publications
from rl.weights import VersionRecord

RECORD = VersionRecord(
    version=0,
    publication=0,
    manifest=(),
    dtype=torch.float32,
    transport="torchstore",
    host="",
    slot=None,
    layout=b"",
    full_digests=True,
)


def test_the_newest_record_of_the_living_versions_is_found() -> None:
    publications = Publications()
    assert publications.find(0) is None
    records = [dataclasses.replace(RECORD, version=v, publication=p) for p, v in enumerate((3, 4, 4, 5))]
    for record in records[:3]:
        publications.add(record)
    assert publications.find(4) is records[2]
    assert publications.find(3) is None
    publications.add(records[3])
    assert [publications.find(version) for version in (4, 5, 6)] == [records[2], records[3], None]
