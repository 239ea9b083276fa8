def is_available():
    return False


def get_arch_list():
    return []
