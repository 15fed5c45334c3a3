"""One rank's life in a refit: declare, agree, move, finish, verify, report."""
