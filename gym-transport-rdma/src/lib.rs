//! What UCX, RDMA and NCCL this machine has, said in a sentence
