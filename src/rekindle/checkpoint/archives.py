"""The zip archive of a torch file: its records and their checksums.

torch.save stores every tensor uncompressed in a zip archive, so a tensor can be overwritten in place. Then its CRC-32
must be updated, which the archive holds twice: beside the record and in the directory at the end.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from itertools import pairwise
from typing import IO, NamedTuple

from rekindle.checkpoint.parts import CheckpointError

MOST_RECORDS = 2_000_000
_LOCAL, _CENTRAL, _DESCRIPTOR = b"PK\x03\x04", b"PK\x01\x02", b"PK\x07\x08"
_FOLDER, _ENCRYPTED = 0x10, 0x2061  # as the reader in torch understands these flags
_PIECE = 1 << 24


class Record(NamedTuple):
    """One file inside the archive. `start` is where its bytes begin, `central` where its directory entry does."""

    name: str
    start: int
    size: int
    header: int
    central: int
    descriptor: bool
    crc: int


def records(file: IO[bytes]) -> list[Record]:
    """Every record of an archive, checked: uncompressed, inside the file, none overlapping another.

    >>> import io, torch
    >>> buffer = io.BytesIO(); torch.save({"a": torch.zeros(3)}, buffer)
    >>> [(record.name.partition("/")[2], record.size) for record in records(buffer)][0:2]
    [('data.pkl', ...), ('.format_version', 1)]
    """
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        central = archive.start_dir
    if len(infos) > MOST_RECORDS:
        raise CheckpointError(f"{len(infos)} records are too many for a torch file")
    file.seek(0, 2)
    size = file.tell()
    found = []
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise CheckpointError(
                f"record {info.filename[:200]!r} is compressed: a TorchScript program or no torch file"
            )
        local = _at(file, info.header_offset, 30)
        if local[:4] != _LOCAL:
            raise CheckpointError(f"record {info.filename[:200]!r} has no header")
        name_length, extra_length = struct.unpack("<HH", local[26:30])
        start = info.header_offset + 30 + name_length + extra_length
        if start + info.file_size > size:
            raise CheckpointError(f"truncated: record {info.filename[:200]!r} reaches beyond the end")
        if info.external_attr & _FOLDER or info.flag_bits & _ENCRYPTED:  # torch would not read its bytes
            raise CheckpointError(f"record {info.filename[:200]!r} is marked as a folder or as encrypted")
        flagged = bool(info.flag_bits & 8)
        found.append(Record(info.filename, start, info.file_size, info.header_offset, central, flagged, info.CRC))
        fixed = _at(file, central, 46)
        if fixed[:4] != _CENTRAL:
            raise CheckpointError("the directory of the archive is damaged")
        central += 46 + sum(struct.unpack("<HHH", fixed[28:34]))
    names = [record.name for record in found]
    if len(set(names)) < len(names):
        raise CheckpointError("a record appears twice in the archive")
    ordered = sorted(found, key=lambda record: record.header)
    for one, other in pairwise(ordered):
        if one.start + one.size > other.header:
            raise CheckpointError(f"records {one.name[:200]!r} and {other.name[:200]!r} overlap")
    return found


def refresh_checksums(file: IO[bytes]) -> int:
    """Bring the CRC-32 of every changed record up to date in an archive open for reading and writing; how many."""
    fresh = 0
    for record in records(file):
        crc = _crc(file, record)
        if crc == record.crc:
            continue
        fresh += 1
        old, stamp = struct.pack("<I", record.crc), struct.pack("<I", crc)
        beside = record.header + 14
        if record.descriptor:
            after = record.start + record.size
            beside = after + 4 if _at(file, after, 4) == _DESCRIPTOR else after
        for place in (beside, record.central + 16):  # last the one by which a resumed job sees what is left to do
            if _at(file, place, 4) not in (old, stamp):  # a damaged flag would lead into another record
                raise CheckpointError(f"the checksum of record {record.name[:200]!r} is not where it should be")
            file.seek(place)
            file.write(stamp)
    file.flush()
    return fresh


def _crc(file: IO[bytes], record: Record) -> int:
    file.seek(record.start)
    crc, left = 0, record.size
    while left:
        piece = file.read(min(left, _PIECE))
        if not piece:
            raise CheckpointError(f"truncated inside record {record.name!r}")
        crc, left = zlib.crc32(piece, crc), left - len(piece)
    return crc


def _at(file: IO[bytes], place: int, length: int) -> bytes:
    file.seek(place)
    return file.read(length)
