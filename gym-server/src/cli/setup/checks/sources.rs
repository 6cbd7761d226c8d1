//! The report of a worker on its configuration: its sources, with masked secrets.

use gym_client::config::GymConfig;
use gym_client::config::{MASK, is_secret_key};

/// The longest configuration that is printed as it is.
const YAML_LINES_MAX: usize = 30;
/// The longest value of an override that is printed.
const VALUE_CHARS_MAX: usize = 120;

/// Returns the lines about a configuration; none for one without files and overrides. With `whole`, a long one is printed too.
pub(super) fn lines(config: &GymConfig, overrides: &[String], of_head: Option<&str>, whole: bool) -> Vec<String> {
    let files: Vec<String> = config.files.iter().map(|file| file.display().to_string()).collect();
    let mut sources: Vec<String> = of_head.map(str::to_owned).into_iter().collect();
    sources.extend(files);
    let overrides: Vec<String> = overrides.iter().map(|text| masked(text)).collect();
    if !overrides.is_empty() {
        sources.push(format!("the command line ({})", overrides.join(" ")));
    }
    if sources.is_empty() {
        return Vec::new();
    }
    let mut lines = vec![format!("configuration: {}, the last wins", sources.join(", "))];
    if sources.len() == 1 {
        lines[0] = format!("configuration: {}", sources[0]);
    }
    let yaml = config.masked_given_yaml();
    let count = yaml.lines().count();
    if whole || count <= YAML_LINES_MAX {
        lines.extend(yaml.lines().map(|line| format!("  {line}")));
    } else {
        lines[0] += &format!(" ({count} lines; -v prints them)");
    }
    lines
}

/// Hides the value of an override whose key is that of a secret, or which may hold one.
fn masked(text: &str) -> String {
    let Some((key, value)) = text.split_once('=') else { return text.to_owned() };
    let last = key.rsplit('.').next().unwrap_or(key).trim_start_matches(['+', '~', '"', '\'']);
    let mut value_masked = serde_json::Value::from(value);
    gym_client::config::mask_secrets(&mut value_masked);
    let value = value_masked.as_str().unwrap_or(value);
    if is_secret_key(last) {
        format!("{key}={MASK}")
    } else if value.trim_start().starts_with(['{', '[']) && value.contains(':') {
        // Keys within may be those of secrets.
        format!("{key}={{…}}")
    } else if value.chars().count() > VALUE_CHARS_MAX {
        format!("{key}={}…", value.chars().take(VALUE_CHARS_MAX).collect::<String>())
    } else {
        format!("{key}={value}")
    }
}

#[cfg(test)]
mod tests {
    use gym_client::config::{ConfigLoader, Overrides};

    use super::*;

    #[test]
    fn secrets_of_overrides_are_masked() {
        for (given, shown) in [
            ("+policy_api_key=sk-1", "+policy_api_key=****"),
            ("++a.b.api_key=\"sk-1\"", "++a.b.api_key=****"),
            ("++a.b={api_key: sk-1}", "++a.b={…}"),
            ("config_paths=[a.yaml,b.yaml]", "config_paths=[a.yaml,b.yaml]"),
            ("+head_server.port=11000", "+head_server.port=11000"),
            ("~policy_model", "~policy_model"),
        ] {
            assert_eq!(masked(given), shown);
        }
        assert!(!masked("+policy_base_url=http://user:hunter2@h/v1").contains("hunter2"));
    }

    #[test]
    fn a_short_configuration_is_printed_with_its_sources_and_a_long_one_on_request() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yaml"), "policy_api_key: sk-1\nx: 2\n").unwrap();
        let given = ["++x=3".to_owned()];
        let overrides = Overrides::parse(given.to_vec()).unwrap();
        let config = ConfigLoader::new(folder.path()).load(&["a.yaml"], &overrides).unwrap();
        let said = lines(&config, &given, None, false).join("\n");
        assert!(
            said.starts_with("configuration: ") && said.contains("a.yaml, the command line (++x=3), the last wins"),
            "{said}"
        );
        assert!(
            said.contains("policy_api_key: '****'")
                || said.contains("policy_api_key: \"****\"")
                || said.contains("policy_api_key: ****"),
            "{said}"
        );
        assert!(!said.contains("sk-1"), "{said}");
        let long: String = (0..60).map(|n| format!("v{n}: {n}\n")).collect();
        std::fs::write(folder.path().join("b.yaml"), long).unwrap();
        let config = ConfigLoader::new(folder.path())
            .load(&["b.yaml"], &Overrides::parse(Vec::<String>::new()).unwrap())
            .unwrap();
        let said = lines(&config, &[], Some("the head server http://h:1"), false);
        assert!(said.len() == 1 && said[0].contains("lines; -v prints them"), "{said:?}");
        assert!(lines(&config, &[], None, true).len() > 60);
    }
}
