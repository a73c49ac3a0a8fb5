"""Users whose histories have semantic ids."""

import numpy as np


class Users:
    """Histories from lists of items."""

    source = "a list"
    num_items = None

    def __init__(self, users):
        self.users = users

    def __len__(self):
        return len(self.users)

    def lengths(self, users):
        return np.array([len(self.users[user]) for user in users], np.int64)

    def tails(self, users, lengths):
        parts = [self.users[user][len(self.users[user]) - length :] for user, length in zip(users, lengths)]
        return np.array([item for part in parts for item in part], np.int64)

    def items_digest(self):
        return ""
