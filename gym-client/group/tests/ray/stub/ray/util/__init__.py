import ray


def get_node_ip_address():
    return ray.PLACE["ip"]
