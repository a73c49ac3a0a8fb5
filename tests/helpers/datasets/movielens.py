"""Small archives of MovieLens-1M and MovieLens-20M."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.datasets import archives

# User 7 rates twice in second 100: the order of the file counts. User 9 has no ratings, user 3 one.
RATINGS = "7::50::5::200\n3::9::1::5\n7::9::4::100\n7::1193::2::100\n7::50::3::99\n"
USERS = "9::M::56::16::70072\n3::F::1::10::48067-1234\n7::M::25::15::55117\n"
MOVIES = "1193::One Flew: Over (1975)::Drama\n9::Misérables, Les (1995)::Drama|Musical\n50::Plain (1999)::War\n"


def write_zip(
    path: Path, *, ratings=RATINGS, users=USERS, movies=MOVIES, readme="SUMMARY\n", folder="ml-1m/", newline="\n"
) -> Path:
    texts = {"ratings": ratings, "users": users, "movies": movies}
    files = {f"{folder}{name}.dat": text.replace("\n", newline).encode("latin-1") for name, text in texts.items()}
    return archives.write_zip(path, {**files, f"{folder}README": readme})


HEADER_20M = "userId,movieId,rating,timestamp\n"
RATINGS_20M = HEADER_20M + "7,50,5.0,200\n7,9,4.0,100\n3,9,0.5,5\n7,1193,2.5,100\n7,50,3.0,99\n"
MOVIES_20M = (
    'movieId,title,genres\n50,Plain (1999),War\n9,"Comma, The ""x"" (1995)",Drama|Musical\n1193,Ñandú (1975),Drama\n'
)


def write_zip_20m(
    path: Path, *, ratings=RATINGS_20M, movies=MOVIES_20M, readme="Summary (ml-20m)", folder="ml-20m/"
) -> Path:
    others = dict.fromkeys(("links.csv", "tags.csv", "genome-scores.csv", "genome-tags.csv"), "a,b\n")
    files = {"ratings.csv": ratings, "movies.csv": movies, "README.txt": readme, **others}
    return archives.write_zip(path, {folder + name: text for name, text in files.items()})
