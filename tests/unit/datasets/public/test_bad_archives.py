"""Raw archives that are wrong, in every way: one line names the file, the line, and what a right one has."""

import pytest

from commons.datasets.public.kuairand import VERSIONS
from commons.datasets.public.movielens import preprocess_movielens
from tests.helpers.datasets.archives import error_of
from tests.helpers.datasets.kuairand import EARLY, LOG_HEADER, files_of, write_tar
from tests.helpers.datasets.movielens import HEADER_20M, MOVIES, MOVIES_20M, RATINGS, RATINGS_20M, USERS
from tests.helpers.datasets.raw_data import ARCHIVES

CLICK = "8,20,20220411,1900,1649675512388,0,0,0,0,0,0,0,1385,209900,0,0,0,0,1\n"


def line_4(line):
    """Ratings of 20M with another fourth line."""
    return "ratings", "3,9,0.5,5\n", f"{line}\n3,9,0.5,5\n"


@pytest.mark.parametrize(
    ("name", "texts", "message"),
    [
        *(
            ("ml-1m", {"ratings": f"{RATINGS}{line}\n"}, f"CSV Error on Line: 6 Original Line: {line} {rule}")
            for line, rule in (
                (
                    "7::50::5",
                    "Expected Number of Columns: 4 Found: 3); it must be lines of UserID::MovieID::Rating::Ti",
                ),
                ("7::50::5::200::1", "Expected Number of Columns: 4 Found: 5"),
                ("7::::5::200", "Error when converting column 'item'"),
                ("7::50::6::200", "Error when converting column 'action'. Could not convert string \"6\" to 'ENUM("),
                ("7::99999999999::3::2", "Error when converting column 'item'"),
            )
        ),
        ("ml-1m", {"movies": "1193::No genres\n" + MOVIES}, "on Line: 1 Original Line: 1193::No genres Expected"),
        ("ml-1m", {"users": USERS + "7::M::1::10::48067\n"}, "users.dat has user_id 7 again"),
        ("ml-1m", {"movies": MOVIES + "9::A::B\n"}, "movies.dat has movie_id 9 again"),
        ("ml-1m", {"ratings": RATINGS + "8::50::5::200\n"}, "users.dat does not list user_id 8, which has"),
        ("ml-1m", {"ratings": "7::51::5::200\n" + RATINGS}, "movies.dat does not list movie_id 51, which"),
        ("ml-1m", {"ratings": RATINGS + "\0" * 50}, "ratings.dat has NUL bytes"),
        ("ml-1m", {"ratings": ""}, "ratings.dat is empty"),
        ("ml-1m", {"ratings": "x" * 500}, "xxx); it must be"),
        ("ml-20m", {"ratings": "userId,movieId,rating\n1,2,3\n"}, ".csv has columns userId, movieId, rating; it must"),
        ("ml-20m", {"ratings": RATINGS_20M + "7,50,3.0,99\n" * 5000 + "7,50,3.0,x\n"}, "on Line: 5007 Original"),
        ("ml-20m", {"ratings": ""}, "ratings.csv has columns none; it must be"),
        ("ml-20m", {"ratings": HEADER_20M}, "ratings.csv has no line below its header"),
        ("ml-20m", {"movies": MOVIES_20M + "9,Again,Drama\n"}, "movies.csv has movieId 9 again; every movieId"),
        ("ml-20m", {"movies": "movieId,title,genres\n"}, "movies.csv has no line below its header"),
        ("ml-20m", {"movies": "id,title\n1,2\n"}, "movies.csv has columns id, title; it must be"),
        ("ml-20m", {"readme": "Summary: this dataset (ml-25m) describes"}, "contains ml-25m, not MovieLens-20M"),
        ("ml-20m", {"folder": "ml-latest-small/"}, "contains ml-latest-small, not MovieLens-20M"),
        ("kuairand-pure", {"early": LOG_HEADER, "late": LOG_HEADER}, "has no interactions in log_standard"),
        ("kuairand-pure", {"late": None}, "no log_standard_4_22_to_5_08_pure.csv; KuaiRand-Pure has log_standard_4_08"),
        ("kuairand-pure", {"early": f"{EARLY}\n{CLICK}9{CLICK[1:]}"}, "does not list user_id 9, which"),
    ],
)
def test_a_wrong_file(tmp_path, name, texts, message):
    found = error_of(ARCHIVES[name][2], ARCHIVES[name][1](tmp_path / "archive", **texts))
    assert message in found and len(found) < 500


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ml-20m", line_4("7,50,3.5,yesterday"), "ratings.csv cannot be read (Conversion Error: CSV Error on Line: 4"),
        ("ml-20m", line_4("7,50,3.5"), "on Line: 4 Original Line: 7,50,3.5 Expected Number of Columns: 4 Found: 3"),
        (
            "ml-20m",
            line_4("7,50,3.7,1"),
            "Error when converting column 'rating'. Could not convert string \"3.7\" to 'ENUM('0.5', ",
        ),
        ("ml-20m", line_4("7,51,3.5,1"), "movies.csv does not list movieId 51, which"),
        (
            "kuairand-pure",
            ("late", "1651338000000,1", "noon,1"),
            "column 'time_ms'. Could not convert string \"noon\" to",
        ),
        (
            "kuairand-pure",
            ("early", "6860,1", "6860,2"),
            "column 'is_click'. Could not convert string \"2\" to 'BOOLEAN'",
        ),
        ("kuairand-pure", ("late", ",long_view,", ",is_click,"), "with is_click, long_view exactly once"),
        (
            "kuairand-pure",
            ("users", "\n5,", "\n5" + "5" * 3_000_000 + ","),
            "pure.csv cannot be read (Conversion Error: CSV Error on Line: 4",
        ),
        ("kuairand-pure", ("late", "3,7,", '3,7"' + "7" * 3_000_000 + ","), "on Line: 3"),
    ],
)
def test_a_wrong_line(tmp_path, name, change, message):
    (texts, write, preprocess), (part, old, new) = ARCHIVES[name], change
    assert old in texts[part]
    assert message in error_of(preprocess, write(tmp_path / "archive", **{part: texts[part].replace(old, new)}))


def test_the_archive_of_another_version(tmp_path):
    source = write_tar(tmp_path / "a.tar.gz", files_of())
    message = "_5_08_1k.csv, user_features_1k.csv; KuaiRand-1K has log_standard_4_08"
    assert message in error_of(VERSIONS["kuairand-1k"].preprocess, source)


def test_what_is_no_archive(tmp_path):
    assert "does not exist" in error_of(preprocess_movielens, tmp_path / "ml-1m.zip", FileNotFoundError)
    (tmp_path / "empty").mkdir()
    assert "found: nothing" in error_of(preprocess_movielens, tmp_path / "empty")
    for index in range(20):
        (tmp_path / "empty" / f"{index:02}.txt").touch()
    assert "07.txt and 12 more" in error_of(preprocess_movielens, tmp_path / "empty")
