"""One job, from its first start to its last: wrapper, supervisor, when it is started again."""
