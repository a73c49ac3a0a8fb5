"""Small MovieLens-20M archives."""

from __future__ import annotations

import zipfile
from pathlib import Path

HEADER = "userId,movieId,rating,timestamp\n"
RATINGS = HEADER + "7,50,5.0,200\n7,9,4.0,100\n3,9,0.5,5\n7,1193,2.5,100\n7,50,3.0,99\n"
MOVIES = (
    'movieId,title,genres\n50,Plain (1999),War\n9,"Comma, The ""x"" (1995)",Drama|Musical\n1193,Ñandú (1975),Drama\n'
)


def write_archive(path: Path, *, ratings=RATINGS, movies=MOVIES, readme="Summary (ml-20m)", folder="ml-20m/") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("ratings.csv", ratings), ("movies.csv", movies), ("README.txt", readme)):
            archive.writestr(folder + name, text)
        for name in ("links.csv", "tags.csv", "genome-scores.csv", "genome-tags.csv"):
            archive.writestr(folder + name, "a,b\n")
    return path
