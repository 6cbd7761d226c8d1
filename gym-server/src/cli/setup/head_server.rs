//! Selects the head server of a command.

use gym_client::config::GymConfig;
use gym_client::registry::is_unspecified;
use gym_core::Endpoint;
use gym_core::transport::host_port;

use crate::cli::args::options::Sources;
use crate::cli::exit::Failure;
use crate::cli::setup::configuration::{LoadedConfig, Need, load};
use crate::stack::Servers;

/// Returns the address of the head server: from `--head-url`, else `+head_server.…`, else `HEAD_SERVER_URL`, else `env.yaml` or the
/// default.
///
/// `url` is the value of the option, which may come from the environment; `typed` is `true` if the option was given.
pub(in crate::cli) fn endpoint(
    url: Option<&str>,
    typed: bool,
    overrides: &[String],
    config: &GymConfig,
) -> Result<Endpoint, Failure> {
    let overridden = overrides.iter().any(|text| {
        let key = text.trim_start_matches(['"', '\'', '+']);
        key.starts_with("head_server.") || key.starts_with("head_server=")
    });
    match url.filter(|url| typed || (!overridden && !url.is_empty())) {
        Some(url) => parse(url),
        None => {
            // Of a head server that binds all addresses, which is looked for on this machine.
            let host = if is_unspecified(&config.head.host) { "127.0.0.1" } else { &config.head.host };
            parse(&format!("http://{}", host_port(host, config.head.port)))
        }
    }
}

/// Returns the configuration and the head server of a command that only asks: the servers of the configuration need not be known.
pub(in crate::cli) async fn of_command(
    url: Option<&str>,
    typed: bool,
    overrides: &[String],
    servers: &Servers,
) -> Result<(GymConfig, Endpoint), Failure> {
    let none = Servers::none().over(servers.transports());
    let LoadedConfig { config, .. } = load(&Sources::default(), overrides, &none, Need::Values).await?;
    let head = endpoint(url, typed, overrides, &config)?;
    Ok((config, head))
}

/// Parses an address that this program can connect to.
pub(in crate::cli) fn parse(url: &str) -> Result<Endpoint, Failure> {
    let wrong = |why: &str| {
        Failure::Usage(format!("head URL `{url}`: {why}\n  fix: write a URL such as --head-url http://127.0.0.1:11000"))
    };
    let endpoint = Endpoint::parse(url).map_err(|_| wrong("the URL has no scheme"))?;
    if endpoint.scheme() != "http" {
        return Err(wrong("the scheme must be http"));
    }
    let (host, port) = endpoint.address().rsplit_once(':').ok_or_else(|| wrong("the URL has no port"))?;
    if host.is_empty() || port.parse::<u16>().is_err() {
        return Err(wrong("the URL does not have the form http://HOST:PORT"));
    }
    Ok(endpoint)
}

#[cfg(test)]
mod tests {
    use gym_client::config::{ConfigLoader, Overrides};

    use super::*;

    fn chosen(url: Option<&str>, typed: bool, overrides: &[&str]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        let parsed = Overrides::parse(&overrides).unwrap();
        let config = ConfigLoader::new(folder.path()).load(&[] as &[&str], &parsed).unwrap();
        endpoint(url, typed, &overrides, &config).unwrap().to_string()
    }

    #[test]
    fn the_option_precedes_the_environment_variable_and_that_the_configuration() {
        let overrides = ["+head_server.host=10.0.0.7", "+head_server.port=7"];
        assert_eq!(chosen(None, false, &[]), "http://127.0.0.1:11000");
        assert_eq!(chosen(None, false, &overrides), "http://10.0.0.7:7");
        assert_eq!(chosen(Some("http://env:1"), false, &[]), "http://env:1");
        assert_eq!(chosen(Some("http://env:1"), false, &overrides), "http://10.0.0.7:7");
        assert_eq!(chosen(Some("http://typed:1/"), true, &overrides), "http://typed:1");
    }

    #[test]
    fn an_address_that_cannot_be_called_is_refused_with_an_example() {
        for url in ["coordinator:11000", "https://h:1", "http://h", "http://h:port", "http://:1"] {
            let Failure::Usage(text) = parse(url).unwrap_err() else { panic!("{url}") };
            assert!(text.contains(url) && text.contains("--head-url http://"), "{text}");
        }
    }
}
