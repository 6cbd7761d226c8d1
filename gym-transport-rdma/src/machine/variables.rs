//! The variables of this field among those of a process. The others are nobody's business.

use std::collections::BTreeMap;

/// Beginnings of names.
const PREFIXES: [&str; 11] =
    ["NCCL_", "UCX_", "RCCL_", "GLOO_", "VLLM_", "RAY_", "SLURM_", "OMPI_", "FI_", "CUDA_VISIBLE_", "MASTER_"];
/// Whole names.
const NAMES: [&str; 6] = ["RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LD_LIBRARY_PATH", "HOME"];
/// Words in the names of secrets.
const SECRETS: [&str; 4] = ["KEY", "TOKEN", "SECRET", "PASSWORD"];
/// Stands for the value of a secret.
pub(super) const MASKED: &str = "***";

/// Returns the variables of this field. Secrets are masked.
///
/// If a name occurs twice, its first value counts, as for `getenv`.
pub(super) fn of_field(all: impl IntoIterator<Item = (String, String)>) -> BTreeMap<String, String> {
    let mut variables = BTreeMap::new();
    for (name, value) in all {
        if is_of_field(&name) {
            let value = if is_secret(&name) && !value.is_empty() { MASKED.to_owned() } else { value };
            variables.entry(name).or_insert(value);
        }
    }
    variables
}

fn is_of_field(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix)) || NAMES.contains(&name) || is_nccl_misspelt(name)
}

/// Returns `true` for names such as `CCL_NET` and `NCLL_DEBUG`, which a user meant for NCCL.
fn is_nccl_misspelt(name: &str) -> bool {
    let Some((word, _)) = name.split_once('_') else { return false };
    let (word, meant) = (word.as_bytes(), b"NCCL");
    // One letter is missing, is too many, or is another one, or two letters changed places.
    let without = |bytes: &[u8], at: usize| [&bytes[..at], &bytes[at + 1..]].concat();
    match word.len() {
        3 => (0..4).any(|at| without(meant, at) == word),
        4 => {
            let mut differ = (0..4).filter(|at| word[*at] != meant[*at]);
            match (differ.next(), differ.next(), differ.next()) {
                (Some(_), None, _) => true,
                (Some(first), Some(second), None) => {
                    second == first + 1 && word[first] == meant[second] && word[second] == meant[first]
                }
                _ => false,
            }
        }
        5 => (0..5).any(|at| without(word, at) == meant),
        _ => false,
    }
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    // A partition key is a number of the fabric, which everybody in it knows.
    let name = name.replace("_PKEY", "_");
    SECRETS.iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_variables_of_the_field_are_told_and_secrets_are_masked() {
        let all = [
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG", "WARN"),
            ("CCL_NET_GDR_LEVEL", "PHB"),
            ("NCLL_IB_HCA", "mlx5"),
            ("VLLM_API_KEY", "sk-1"),
            ("VLLM_APPKEY", "sk-2"),
            ("NCCL_IB_PKEY", "1"),
            ("RAY_token", "t"),
            ("RANK", "0"),
            ("AWS_SECRET_ACCESS_KEY", "x"),
            ("PATH", "/bin"),
            ("HOME", "/root"),
            ("ACL_X", "1"),
            ("RANKS", "1"),
        ];
        let told = of_field(all.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let told: Vec<(&str, &str)> = told.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        let expected = [
            ("CCL_NET_GDR_LEVEL", "PHB"),
            ("HOME", "/root"),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_IB_PKEY", "1"),
            ("NCLL_IB_HCA", "mlx5"),
            ("RANK", "0"),
            ("RAY_token", MASKED),
            ("VLLM_API_KEY", MASKED),
            ("VLLM_APPKEY", MASKED),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn names_near_nccl_are_meant_for_it() {
        for name in ["NCCL", "CCL_X", "NCL_X", "NCLC_X", "CNCL_X", "NCCLL_X", "NNCCL_X", "MCCL_X"] {
            assert_eq!(is_nccl_misspelt(name), name != "NCCL", "{name}");
        }
        for name in ["ACCEL_X", "LLCN_X", "NC_X", "HCCS_X", "PATH", "_X", ""] {
            assert!(!is_nccl_misspelt(name), "{name}");
        }
    }
}
