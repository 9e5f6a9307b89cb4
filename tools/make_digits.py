#!/usr/bin/env python3
"""Writes the IDX files of examples/data from the table digits.csv.gz of Debian's python3-sklearn.

    apt-get download python3-sklearn && dpkg -x python3-sklearn_*.deb unpacked
    tools/make_digits.py unpacked/usr/lib/python3/dist-packages/sklearn/datasets/data/digits.csv.gz \
        examples/data

Needs Python alone. A row of the table is 64 grey values (0..16), row by row, and the digit.
Invariant: the same table gives the same bytes: the split is a function of row numbers and digits
alone. To change the split: `TEST_COUNT`; then renew SHA256SUMS and the README beside the files.
"""

import gzip
import hashlib
import os
import struct
import sys

TEST_COUNT = 360
SIDE = 8
LEVELS = 16


def read_table(path):
    rows = []
    with gzip.open(path, "rt", encoding="ascii") as table:
        for number, line in enumerate(table, 1):
            values = [int(float(word)) for word in line.split(",")]
            image, digit = values[:-1], values[-1]
            if len(image) != SIDE * SIDE or not all(0 <= v <= LEVELS for v in image):
                sys.exit(f"{path}:{number}: expected {SIDE * SIDE} values from 0 to {LEVELS}")
            if not 0 <= digit <= 9:
                sys.exit(f"{path}:{number}: {digit} is no digit")
            rows.append((bytes(image), digit))
    return rows


def shares(counts, total):
    """Splits `total` over the classes in proportion to counts, by largest remainders."""
    everything = sum(counts)
    given = [count * total // everything for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda k: (-(counts[k] * total % everything), k))
    for k in by_remainder[: total - sum(given)]:
        given[k] += 1
    return given


def choose_test(rows):
    """Row numbers of the test set: of each digit, those whose hashed row number is smallest."""
    members = [[i for i, (_, digit) in enumerate(rows) if digit == d] for d in range(10)]
    chosen = set()
    for indices, count in zip(members, shares([len(m) for m in members], TEST_COUNT)):
        by_hash = sorted(indices, key=lambda i: hashlib.sha256(str(i).encode()).hexdigest())
        chosen.update(by_hash[:count])
    return chosen


def write_idx(path, shape, data):
    """IDX: two zero bytes, type 8 (unsigned byte), rank, big-endian sizes, then the bytes."""
    with open(path, "wb") as out:
        out.write(struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape))
        out.write(data)
    with open(path, "rb") as written:
        return hashlib.sha256(written.read()).hexdigest()


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    table, folder = sys.argv[1:]
    rows = read_table(table)
    chosen = choose_test(rows)
    sums = []
    for part in ("train", "test"):
        picked = [row for i, row in enumerate(rows) if (i in chosen) == (part == "test")]
        images = b"".join(image for image, _ in picked)
        labels = bytes(digit for _, digit in picked)
        for kind, shape, data in (
            ("images", (len(picked), SIDE, SIDE), images),
            ("labels", (len(picked),), labels),
        ):
            name = f"digits-{part}-{kind}.idx"
            sums.append(f"{write_idx(os.path.join(folder, name), shape, data)}  {name}\n")
    with open(os.path.join(folder, "SHA256SUMS"), "w", encoding="ascii") as out:
        out.writelines(sums)


if __name__ == "__main__":
    main()
