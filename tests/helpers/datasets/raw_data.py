"""The raw data of each publisher: texts, writer of a small archive with some texts changed, and preprocessor."""

from commons.datasets.public.movielens import preprocess_movielens, preprocess_movielens_20m
from tests.helpers.datasets import kuairand, movielens

ARCHIVES = {
    "ml-1m": (
        {"ratings": movielens.RATINGS, "users": movielens.USERS, "movies": movielens.MOVIES},
        movielens.write_zip,
        preprocess_movielens,
    ),
    "ml-20m": (
        {"ratings": movielens.RATINGS_20M, "movies": movielens.MOVIES_20M},
        movielens.write_zip_20m,
        preprocess_movielens_20m,
    ),
    "kuairand-pure": (
        {"early": kuairand.EARLY, "late": kuairand.LATE, "users": kuairand.USERS},
        lambda path, **texts: kuairand.write_tar(path, kuairand.files_of(**texts)),
        kuairand.PURE.preprocess,
    ),
}
